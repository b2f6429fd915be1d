"""What is known of a graph before anything is decided: costs, liveness, blocks, stages, memory."""
