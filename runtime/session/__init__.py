"""The public API: a session, and a pipeline of several."""
