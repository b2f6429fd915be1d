"""Packages in other projects' servers: the files that servers read, and the modules that they import."""
