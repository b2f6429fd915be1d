"""The caller's face: a session, and a pipeline of several."""
