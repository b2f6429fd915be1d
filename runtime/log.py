"""What sessions say under Python's logging, by the name `splitc`: nothing, until a program gives that a handler."""

from __future__ import annotations

import logging

LOG = logging.getLogger("splitc")
# Without any handler, Python prints warnings.
LOG.addHandler(logging.NullHandler())
