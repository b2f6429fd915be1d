"""Progress bars, with rates and the remaining time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from splitc.runtime.cli.terminal import err
from splitc.runtime.threads.progress import Bytes, listening
from splitc.runtime.units import format_bytes


@contextmanager
def shown_bars() -> Iterator[None]:
    """Show progress bars while the block runs, on terminals only. They disappear at the end."""
    if not err.is_terminal:  # rich before 14.3 would print an empty line
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), _Count(Column(no_wrap=True)), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bars:
        known: dict[str, TaskID] = {}
        lock = Lock()  # several threads count

        def show(what: str, done: float, total: int) -> None:
            with lock:
                if what not in known:
                    known[what] = bars.add_task(what, total=total)
                bars.update(known[what], completed=done, total=total)
                if done == total:
                    bars.remove_task(known.pop(what))

        with listening(show):
            yield


class _Count(ProgressColumn):
    """The amount done, in numbers or bytes, and per second."""

    def render(self, task: Task) -> Text:
        done, total, speed = int(task.completed), task.total or 0, task.speed
        if isinstance(total, Bytes):
            rate = f", {format_bytes(int(speed))}/s" if speed else ""
            return Text(f"{format_bytes(done)} of {format_bytes(total)}{rate}")
        rate = f", {speed:.3g}/s" if speed else ""
        return Text(f"{done} of {int(total)}{rate}")
