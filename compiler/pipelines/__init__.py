"""Pipelines: a folder of models becomes one package, whose modules share the devices."""
