"""A model's feeds: checked, generated, cut into micro-batches."""
