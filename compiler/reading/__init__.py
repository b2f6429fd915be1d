"""Reads a model's files without its weights, and checks that they are complete."""
