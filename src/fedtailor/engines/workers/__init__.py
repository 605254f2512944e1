"""Clients in worker processes: the parent's side (pool, process) and the worker's (worker, lifeline)."""
