"""Generated from proto/messages/v1; see scripts/generate_proto.py."""
