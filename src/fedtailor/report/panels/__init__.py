"""The panels that every report has. Each is a function from runs to plain data."""
