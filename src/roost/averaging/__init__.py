"""Ring averaging over chunks of a flattened segment. torch, no network."""
