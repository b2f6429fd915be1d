"""The command line's app, with the compiler's commands."""

from __future__ import annotations

import splitc.compiler.cli
from splitc.runtime.cli.commands import app

__all__ = ["app"]
assert splitc.compiler.cli  # it adds its commands when it is imported
