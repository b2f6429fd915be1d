"""Reads a model's file into a checked graph in normal form, and finds shapes, constants, states and roles of inputs."""
