"""The progress bar of compile and build: a single bar, for the current step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from splitc.compiler.packaging.builder import Building
from splitc.compiler.packaging.weight_files import Progress as Written
from splitc.runtime.cli.terminal import err
from splitc.runtime.units import format_bytes

WRITING, CHECKING, BUILDING = "writing weights", "checking the package", "building engines"


@contextmanager
def shown_progress() -> Iterator[tuple[Written, Building]]:
    """A bar for written bytes, and for built engines. It shows on terminals only, and disappears at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(20), _Amount(Column(no_wrap=True)), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        bar.add_task(WRITING, total=None)

        def show(what: str, done: float, total: int) -> None:
            if bar.tasks[0].description != what:
                bar.remove_task(bar.task_ids[0])
                bar.add_task(what, total=None)
            bar.update(bar.task_ids[0], completed=done, total=total or None)

        def wrote(done: int, total: int) -> None:
            show(WRITING, done, total)
            if done == total:
                show(CHECKING, 0, 0)

        yield wrote, partial(show, BUILDING)


class _Amount(ProgressColumn):
    """Bytes and their rate, or the number of engines."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        if task.description == BUILDING:
            return Text(f"{int(task.completed)} of {int(task.total)}")
        rate = f", {format_bytes(int(task.speed))}/s" if task.speed else ""
        return Text(f"{format_bytes(int(task.completed))} of {format_bytes(int(task.total))}{rate}")
