"""One GPU: its memory, copies, weights and captured graphs."""
