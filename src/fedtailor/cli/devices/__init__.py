"""Commands for devices: the files that they run, what these do there, and what a device can train."""
