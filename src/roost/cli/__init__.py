"""The command line: the only place that reads arguments and environment variables, and that prints."""
