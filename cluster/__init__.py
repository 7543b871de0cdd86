"""Decisions as pure functions: snapshot in, decision out."""
