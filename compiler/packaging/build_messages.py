"""The messages to and from processes that build engines. The module imports little, so that these start fast."""

from __future__ import annotations

from msgspec import Struct

from splitc.runtime.package.manifest import BuildOptions, Built, Sizes

# The metadata key of a node's block.
BLOCK = "splitc.block"


class Job(Struct, frozen=True):
    """One engine to build for a GPU.

    - `source`: the ONNX file.
    - `engine`: the engine's file; None to only parse the source.
    - `where`: names the engine in messages.
    """

    source: str
    engine: str | None
    sizes: dict[str, Sizes]
    where: str
    gpu: int = 0


class Refusal(Struct, frozen=True):
    """A node that a builder does not support, and the reason."""

    node: str
    operator: str
    block: str
    reason: str

    def __str__(self) -> str:
        return f"{self.block}: '{self.node}' ({self.operator})"


class Order(Struct, frozen=True):
    """What a process has to build: engines of one kind."""

    kind: str
    jobs: list[Job]
    options: BuildOptions
    timing_cache: str | None


class Progress(Struct, frozen=True, tag="progress"):
    """The progress of one job, from 0 to 1."""

    job: int
    done: float


class Failed(Struct, frozen=True, tag="failed"):
    """A failed job: the nodes that were refused; or TensorRT's message, and the nodes that it names."""

    job: int
    refused: list[Refusal]
    message: str = ""


class Finished(Struct, frozen=True, tag="finished"):
    """All jobs are done."""

    built: Built


Message = Progress | Failed | Finished
