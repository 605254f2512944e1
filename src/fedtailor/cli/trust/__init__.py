"""Commands about bad clients, about what a run reveals, and about what it can prove."""
