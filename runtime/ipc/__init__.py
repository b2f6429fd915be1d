"""Messages and shared memory between processes."""
