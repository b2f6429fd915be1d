"""Brings a model into the one form that all later passes expect, by rewriting it."""
