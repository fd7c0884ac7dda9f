"""Models that people really train, each with a batch of data, for the checks of capture."""
