"""Sizes of a model's inputs, and what inputs mean: given, by default, tried, and for probing."""
