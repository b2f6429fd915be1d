"""Ranks that are processes which MPI has started, on one machine or on several."""
