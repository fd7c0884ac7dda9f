"""Checkpoints: assemble, save and restore a whole model and its optimizer state. torch, no network."""
