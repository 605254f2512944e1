"""A log of a run that nobody can change unseen: every line holds the hash of the one before it, and is signed."""
