"""A model's file becomes a graph in normal form: checked, with shapes, constants, states and roles of inputs."""
