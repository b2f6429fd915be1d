"""Arrays: their number types, files, and settings."""
