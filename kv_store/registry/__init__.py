"""Who holds which block: a protocol, Redis behind it, and memory for one process."""
