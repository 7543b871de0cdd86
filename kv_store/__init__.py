"""Paged KV: memory, names, moves."""
