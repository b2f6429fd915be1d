"""Finds decomposed attention by structure, and writes it as one operator."""
