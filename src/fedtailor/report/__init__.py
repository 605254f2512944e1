"""What people see of a run: rows and tables."""
