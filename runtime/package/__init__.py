"""A package as files: its manifest, and checks of the manifest and the files."""
