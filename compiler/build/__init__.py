"""Engine files from stage graphs, one module an engine kind."""
