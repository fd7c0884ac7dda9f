"""One stage of a pipeline: forward, backward, weight versions, optimizer, and tensors as bytes. torch, no network."""
