"""The interface to build engines from ONNX files. Each kind of engine has a module with a `BUILDER`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.packaging.build_messages import Job, Refusal
from splitc.compiler.planning.split import RankProgram
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.errors import SplitcError
from splitc.runtime.package.manifest import BuildOptions, Built


class BuildError(SplitcError):
    """An engine can't be built, or its builder does not support a node of the model."""

    page = "engines"


class Builder(Protocol):
    """Builds engines of one or several kinds, named by `engine`."""

    def check_here(self, engine: str) -> None:
        """Raise MisuseError if this machine can't build such engines."""

    def prepare(self, analysis: Analysis, programs: Sequence[RankProgram]) -> Iterable[RankProgram]:
        """The ranks' programs with the input sizes that engines are built for. Their graphs are prepared, in place.

        Raises ModelError if the size of an engine's input can't be known.
        """

    def engine_path(self, folder: Path, stage: str, group: Sequence[int]) -> Path:
        """The engine's file for a stage's ONNX file. `group` are the ranks of collectives inside the engine, if any."""

    def build(
        self,
        engine: str,
        jobs: Sequence[Job],
        options: BuildOptions,
        timing_cache: Path,
        at_once: int | None = None,
    ) -> Built:
        """Build engines, `at_once` of them side by side if memory allows; None for as many as there are cores.

        Builders that measure kernels keep the timings in the file `timing_cache`.

        Raises MisuseError if the engine's library is missing, BuildError if an engine can't be built.
        """

    def find_refused(self, engine: str, jobs: Sequence[Job]) -> list[tuple[Job, Refusal]]:
        """The nodes in the jobs' ONNX files that are not supported. Builds nothing."""


def find_builder(engine: str) -> Builder:
    """The builder of a kind of engines."""
    module = find_kind(engine).builder
    assert module is not None, f"{engine} engines are not built"
    builder: Builder = import_module(module).BUILDER
    return builder
