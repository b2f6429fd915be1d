"""Facts about a graph before any decision: costs, blocks, stages, memory."""
