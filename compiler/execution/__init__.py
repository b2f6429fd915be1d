"""How ONNX Runtime runs a graph: what it makes of the nodes, in which order, and the memory that it takes."""
