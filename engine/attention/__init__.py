"""Attention over the arena: the function that model code calls and its backends."""
