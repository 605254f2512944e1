"""Where clients run: in this process, in worker processes, or on other machines."""
