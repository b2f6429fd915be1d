"""Which axes of a graph are sharded, which units each rank holds, and why the rest is replicated."""
