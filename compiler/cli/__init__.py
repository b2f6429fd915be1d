"""The commands plan, compile and build."""
