"""Finds caches that are concatenated or written by index, and has attention write them in place."""
