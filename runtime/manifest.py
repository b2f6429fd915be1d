"""The package's manifest: its schema, and how it is read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from splitc.runtime.errors import PackageError
from splitc.runtime.steps import Step

SCHEMA = 2
FILE_NAME = "manifest.json"


class Fill(Struct, frozen=True):
    """How to make up an array for an input: normally distributed numbers, ones, zeros, or whole numbers by chance from
    `low` to before `high`; or numbers that count up along the last axis, and begin again at `high` where it is not 0.
    """

    kind: Literal["normal", "ones", "zeros", "arange", "randint"]
    low: int = 0
    high: int = 0


class Role(Struct, frozen=True):
    """What an input is: `indices` of a table of so many `rows`, `positions` (in a table, where it has rows), a `mask`
    that attention's mask is made from, or a `bias` that is added to its scores as it is.
    """

    kind: str
    rows: int = 0


# What a file says of a shape: a dimension is a number, a symbol, or unknown; None is any shape, of any rank.
Shape = list[int | str | None] | None


class Tensor(Struct, frozen=True):
    """An input or output of the model. `dtype` is numpy's name.

    `sample_shape` has a number for every dimension: the sizes that were planned for. The engines take sizes from
    `min_shape` to `max_shape`; None is no limit beside `shape`.
    """

    name: str
    dtype: str
    shape: Shape
    sample_shape: list[int] | None = None
    fill: Fill | None = None
    min_shape: list[int] | None = None
    max_shape: list[int] | None = None
    role: Role | None = None


class FixedInput(Struct, frozen=True):
    """An input that the model has and the package does not: it is that `value` here, or nothing reads it (None)."""

    name: str
    dtype: str
    shape: Shape
    value: Any = None


class State(Struct, frozen=True):
    """A model input that is meant to be fed with an output of the step before (a past and its present).

    A sequence begins with zeros, of length 0 along the axis `grows` where a step makes the state longer. With
    `in_place` the engine can write the output over the input, which then has room for what is to come.
    """

    input: str
    output: str
    grows: int | None = None
    in_place: bool = False


class AxisPart(Struct, frozen=True):
    """A part of an axis, which is seen as a product of `sizes`, major first (-1: whatever is left).

    `ranges` has for each of these the first and the one after the last that belong to the part; None means all.
    """

    axis: int
    sizes: list[int]
    ranges: list[tuple[int, int] | None]


class Part(Struct, frozen=True):
    """The part of an input or output of the model that a rank takes or gives, where that is not all of it."""

    name: str
    axes: list[AxisPart]


class Override(Struct, frozen=True):
    """An optional input as a rank's engines take it: in the place of their weight `value`.

    `places` has, for each axis along which the rank has a part only, stretches from a first element to before a last.
    """

    input: str
    value: str
    places: dict[int, list[tuple[int, int]]] = {}


class Sizes(Struct, frozen=True):
    """What an engine's input may be: its smallest, its typical and its largest shape.

    `values` are those of a list of sizes that the model computes (a target shape), likewise; None for any other input.
    """

    shapes: tuple[list[int], list[int], list[int]]
    values: tuple[list[int], list[int], list[int]] | None = None


class EngineFile(Struct, frozen=True):
    """An engine of a rank: its file, relative to the package, and the names that it takes and gives.

    `source` is the ONNX file that it is built from, where the package holds that, and `sizes` the inputs' that it is
    built for. `group` are the ranks with which it exchanges values while it runs, itself included.
    `sizes_only` are the inputs of which it reads nothing but the sizes.
    """

    path: str
    inputs: list[str]
    outputs: list[str]
    sizes_only: list[str] = []
    source: str | None = None
    sizes: dict[str, Sizes] = {}
    group: list[int] = []


class Rank(Struct, frozen=True):
    """One worker on one device: what it loads, what it runs, and what that was predicted to hold, in bytes.

    `parts` are those inputs and outputs of which it takes or gives only a part, `overrides` the optional inputs among
    its weights. `keeps` are outputs that it makes for its states and another rank hands to the caller.
    `total_bytes` is the most at any time, loading included, which may be more than the sum of the others.
    """

    device: str
    blocks: list[str]
    engines: list[EngineFile]
    program: list[Step]
    inputs: list[str]
    outputs: list[str]
    parts: list[Part]
    keeps: list[str]
    weights_bytes: int
    activation_bytes: int
    cache_bytes: int
    total_bytes: int
    overrides: list[Override] = []


class Cut(Struct, frozen=True):
    """What crosses from all earlier stages into those after the cut, in bytes a run for the planned shapes."""

    values: list[str]
    bytes: int


class Source(Struct, frozen=True):
    """The model that the package was made from. `sha256` is that of its ONNX file, without external data."""

    name: str
    sha256: str


class BuildOptions(Struct, frozen=True):
    """How TensorRT builds engines; None leaves a choice to it. `workspace` is in bytes.

    `tactic_sources` are names of trt.TacticSource. With `strip_weights` an engine takes its weights from its source.
    """

    optimization_level: int | None = None
    workspace: int | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    weight_streaming: bool = False
    strip_weights: bool = False
    tactic_sources: list[str] | None = None


class Built(Struct, frozen=True):
    """What built the engines: TensorRT's version, and the GPU's name and compute capability, if there was one."""

    version: str
    gpu: str | None = None
    compute_capability: str | None = None


class Build(Struct, frozen=True):
    """How a package's engines are built, and what built them; None while they are not."""

    options: BuildOptions
    built: Built | None = None


class UnsplitWeight(Struct, frozen=True):
    """A weight that a split mode had to leave whole on each rank."""

    name: str
    bytes: int
    reason: str


class File(Struct, frozen=True):
    """A file of the package, its size and hash, to be verified before it is loaded.

    A hard link to the model's own data has no hash: to read it would take as long as to copy it.
    """

    path: str
    bytes: int
    sha256: str | None


class Manifest(Struct, frozen=True):
    """All that the runtime knows of a package. Threads are those of each CPU device; None divides the cores.

    `build` is for engines that are not the ONNX files themselves. `fixed` are inputs of the model that are none here.
    `optional` are inputs beside `inputs` that need not be fed: the engines have the model's values for them.
    `batch` has the axis of each input and output along which rows don't depend on each other, if there is one.
    """

    schema: int
    splitc: str
    source: Source
    split_mode: str
    engine: str
    number_type: str
    threads: int | None
    inputs: list[Tensor]
    outputs: list[Tensor]
    states: list[State]
    batch: dict[str, int] | None
    blocks: list[str]
    ranks: list[Rank]
    cuts: list[Cut]
    collectives: int
    unsplit: list[UnsplitWeight]
    files: list[File]
    build: Build | None = None
    fixed: list[FixedInput] = []
    optional: list[Tensor] = []


class _Version(Struct, frozen=True):
    schema: int


def encode(manifest: Manifest) -> bytes:
    """The manifest as indented JSON, the same bytes each time."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def read_manifest(package: Path) -> Manifest:
    """Read a package's manifest. Raises PackageError when there is none, or one that this version can't read."""
    path = package / FILE_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        what = "has no manifest.json, so it is no package" if package.is_dir() else "does not exist"
        raise PackageError(f"{package} {what}; make one with 'splitc compile'") from None
    except OSError as error:
        raise PackageError(f"can't read {path}: {error.strerror}") from error
    try:
        # The version first: a newer schema must be named as such, not as a field that is missing.
        schema = msgspec.json.decode(text, type=_Version).schema
        if schema != SCHEMA:
            raise PackageError(
                f"{path} has schema version {schema}, and this splitc reads version {SCHEMA}: "
                + ("upgrade splitc" if schema > SCHEMA else "compile the model again")
            )
        return msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError as error:
        raise PackageError(f"{path} is damaged ({error}): compile the model again") from error
