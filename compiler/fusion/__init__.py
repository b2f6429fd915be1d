"""Replaces decomposed patterns (attention, norms, rotary embedding) by operators that engines have kernels for."""
