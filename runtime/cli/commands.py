"""The command line with all its commands, for programs that call several."""

from __future__ import annotations

from splitc.runtime.cli.app import COMMANDS, add_commands, app

__all__ = ["app"]
add_commands(app, [*COMMANDS])
