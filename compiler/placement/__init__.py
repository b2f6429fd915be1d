"""Weights that lie on other devices than the blocks: which those are, and which nodes go with them."""
