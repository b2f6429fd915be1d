"""Pipelines of other projects on a package."""
