"""Secure aggregation for pieces of different sizes: the server learns sums over clients, and no client's own update."""
