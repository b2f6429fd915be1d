"""What packaging asks of a kind of engines that is built from ONNX files. Each kind has a module with a `BUILDER`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.planning.split import RankProgram
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.errors import SplitcError
from splitc.runtime.manifest import BuildOptions, Built, Sizes

# Told the number of engines that are built, with a fraction for the one under way, and how many there are.
Building = Callable[[float, int], None]


class BuildError(SplitcError):
    """An engine can't take a piece of the model, or could not be built."""


class Job(Struct, frozen=True):
    """One engine to build: from the ONNX file `source` to the file `engine`, for a GPU. Without an engine, just parse.

    `where` names it for people.
    """

    source: str
    engine: str | None
    sizes: dict[str, Sizes]
    where: str
    gpu: int = 0


class Refusal(Struct, frozen=True):
    """A node that an engine does not take, by name, operator and block, and what is said of it."""

    node: str
    operator: str
    block: str
    reason: str

    def __str__(self) -> str:
        return f"{self.block}: '{self.node}' ({self.operator})"


class Builder(Protocol):
    """Builds engines of one kind or several, named by `engine`."""

    def check_here(self, engine: str) -> None:
        """Raise MisuseError where this machine can't build such engines."""

    def prepare(self, analysis: Analysis, programs: Sequence[RankProgram]) -> Iterable[RankProgram]:
        """The ranks' programs with the sizes that their engines are built for; their graphs are made fit, in place.

        Raises ModelError where a size that an engine takes can't be known.
        """

    def engine_path(self, folder: Path, stage: str, group: Sequence[int]) -> Path:
        """Where the engine of a stage's file goes. `group` are the ranks that it exchanges values with, if any."""

    def build(
        self,
        engine: str,
        jobs: Sequence[Job],
        options: BuildOptions,
        timing_cache: Path,
        building: Building,
    ) -> Built:
        """Build engines. Timings are kept in the file `timing_cache`, by kinds that take some.

        Raises MisuseError where the engine's library is missing, BuildError naming what can't be built.
        """

    def find_refused(self, engine: str, jobs: Sequence[Job]) -> list[tuple[Job, Refusal]]:
        """The nodes that are refused of the jobs' ONNX files; nothing is built."""


def find_builder(engine: str) -> Builder:
    """The builder of a kind of engines."""
    module = find_kind(engine).builder
    assert module is not None, f"{engine} engines are not built"
    builder: Builder = import_module(module).BUILDER
    return builder
