"""Replaces decomposed subgraphs by operators that engines have kernels for: norms, rotary embeddings, experts, all."""
