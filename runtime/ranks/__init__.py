"""One rank at work: its loop, and what runs it."""
