"""Rewrites the graph of an engine for the device that runs it."""
