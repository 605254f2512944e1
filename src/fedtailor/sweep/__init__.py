"""Many runs that differ in method, seed and grid: planned, run side by side, taken up again after any interruption."""
