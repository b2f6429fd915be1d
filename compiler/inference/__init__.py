"""Shapes of a graph's values, symbolic and in numbers, and what follows from them."""
