"""The requester's side: serves graph, weights and samples, receives checkpoints."""
