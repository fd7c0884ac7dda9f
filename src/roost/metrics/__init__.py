"""Counters over time and events on disk."""
