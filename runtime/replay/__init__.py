"""Replay requests as CUDA graphs."""
