"""Weights that lie on other devices than the blocks: which these are, and which nodes go with them."""
