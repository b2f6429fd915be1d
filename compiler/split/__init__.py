"""How a model becomes rank graphs, one module a split mode."""
