"""Ranks as MPI's processes, on one machine or on several."""
