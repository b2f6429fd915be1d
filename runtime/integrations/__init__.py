"""Integrations with other projects: their pipelines and models run on a package."""
