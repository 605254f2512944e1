"""Simulated time: which piece a device can finish, how long a round takes, and merging that waits for nobody."""
