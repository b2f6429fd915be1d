"""Requests and sequences on their way to the ranks and back."""
