"""A user's request for a plan, from the command line or from Python."""
