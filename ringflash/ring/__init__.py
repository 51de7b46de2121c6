"""The plan of a ring, what its ranks exchange, and the one loop that runs it."""
