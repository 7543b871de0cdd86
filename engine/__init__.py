"""Model execution without a network."""
