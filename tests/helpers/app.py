"""The command line's app, with the compiler's commands."""

from __future__ import annotations

from splitc.runtime.cli.commands import app

__all__ = ["app"]
