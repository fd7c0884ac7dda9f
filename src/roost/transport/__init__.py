"""Carries messages between peers: one narrow interface, an in-process twin, and gRPC with mutual TLS."""
