"""The largest numbers that a session takes, for commands that do not open one."""

from __future__ import annotations

# The most requests in flight. Each has its feeds, activations and outputs in memory. A choice: far more than any
# machine holds, so that a number with too many digits is refused in words.
MOST_AT_ONCE = 10_000
# The largest capacity of a sequence, in tokens.
MOST_CAPACITY = (1 << 31) - 1
