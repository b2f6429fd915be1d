"""Files written atomically, the user's cache, and text from untrusted files."""
