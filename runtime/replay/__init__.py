"""Requests as CUDA graphs."""
