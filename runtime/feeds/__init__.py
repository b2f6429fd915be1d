"""What goes into a model: checked, made up, cut into micro-batches."""
