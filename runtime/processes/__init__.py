"""Ranks that are processes of their own: one for each GPU, and for CPU devices on demand."""
