"""Devices: which there are, what they hold, and how fast they are."""
