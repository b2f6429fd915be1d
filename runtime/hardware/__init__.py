"""Devices: names, memory and speed."""
