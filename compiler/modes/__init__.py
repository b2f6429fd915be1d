"""The split modes, one module each."""
