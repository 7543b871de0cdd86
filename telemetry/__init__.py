"""Logs, metrics and step records; every name in one place."""
