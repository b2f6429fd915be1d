"""Tensor parallelism: which axes of a graph are sharded, which units each rank holds, why the rest is replicated."""
