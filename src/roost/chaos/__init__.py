"""Faults on the processes and links of a local pool, drawn from a seed, and what became of the training (docs/failover.md)."""
