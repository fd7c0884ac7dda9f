"""Benchmarks: each is one command, `python -m benchmarks.NAME`, and prints one JSON object as its last line."""
