"""Ranks as processes: one for each GPU, and for CPU devices on demand."""
