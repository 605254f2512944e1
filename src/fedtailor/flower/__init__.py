"""A run across machines: Flower carries the messages, the round loop is the one of every other run."""
