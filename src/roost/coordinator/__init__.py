"""The matchmaking process: admits peers, plans, watches jobs; never imports torch."""
