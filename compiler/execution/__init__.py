"""Models ONNX Runtime's execution of a graph: which nodes it fuses, their order, and the memory they take."""
