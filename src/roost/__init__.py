"""Roost trains one PyTorch model on the PCs people already have."""

__version__ = "0.1.0"
