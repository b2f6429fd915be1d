"""What is known about a graph before any decision: costs, liveness, blocks, stages, memory."""
