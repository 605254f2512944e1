"""Differential privacy of clients: what is clipped, which noise is added, what that costs, and a ledger of it."""
