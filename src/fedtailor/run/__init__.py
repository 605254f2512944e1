"""A run from its settings to its result: ``setup``, ``interface``, ``result``."""
