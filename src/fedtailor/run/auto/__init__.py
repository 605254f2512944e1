"""``method.name = "auto"``: which method a run takes, and why."""
