"""Python client of KVFerry."""
