"""Moving block bytes between workers: a protocol, NIXL behind it, and a loopback."""
