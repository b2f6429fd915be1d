"""What a user asks of a plan, as the command line and Python give it."""
