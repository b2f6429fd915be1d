"""Reads a model's file into a checked graph in normal form, with shapes, constants, states and roles of inputs."""
