"""The demo's model and data."""
