"""Commands about bad clients and about what a run can prove."""
