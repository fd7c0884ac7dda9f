"""Pure state machines: events in, instructions out. No torch, no IO, no clock."""
