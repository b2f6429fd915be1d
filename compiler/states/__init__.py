"""Inputs that take an output of the request before, such as caches."""
