"""The ranks of a session: each runs its program in a thread."""
