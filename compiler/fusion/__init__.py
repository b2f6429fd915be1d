"""What exporters wrote out becomes the operators that an engine has kernels for."""
