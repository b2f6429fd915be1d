"""Arrays of numbers: their types, files of them, and settings."""
