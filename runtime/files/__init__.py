"""Files that are written whole, the user's cache, and text of others."""
