"""Writes rank graphs as engine files, and makes a checked package of them."""
