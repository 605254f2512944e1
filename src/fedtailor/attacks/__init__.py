"""Bad clients for one's own runs: what some of them do to a result, and what a rule of [merge] saves of it."""
