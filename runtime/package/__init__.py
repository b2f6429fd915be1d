"""A package as files: its manifest, what that may say, and whether its files are as it says."""
