"""Replaces decomposed subgraphs (attention, norms, rotary embeddings) by operators that engines have kernels for."""
