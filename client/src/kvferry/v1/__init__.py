"""Generated from proto/kvferry/v1; see scripts/generate_proto.py."""
