"""The Worker deployment: one engine, its hand-offs and its link to the gateways."""
