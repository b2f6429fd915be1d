"""Log messages of sessions, under the name `splitc`: none until a program sets a handler for it."""

from __future__ import annotations

import logging

LOG = logging.getLogger("splitc")
# Without any handler, Python prints warnings.
LOG.addHandler(logging.NullHandler())
