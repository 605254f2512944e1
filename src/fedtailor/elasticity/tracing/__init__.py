"""From a module to its channel groups: what is recorded, which rule carries units on, what they add up to."""
