"""Roost trains one PyTorch model on the PCs people already have."""
