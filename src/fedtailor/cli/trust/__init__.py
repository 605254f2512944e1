"""Commands about whom a run has to trust."""
