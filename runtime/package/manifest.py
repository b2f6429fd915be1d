"""The schema of a package's manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from splitc.runtime.package.engine_file import Build as Build
from splitc.runtime.package.engine_file import BuildOptions as BuildOptions
from splitc.runtime.package.engine_file import Built as Built
from splitc.runtime.package.engine_file import EngineFile as EngineFile
from splitc.runtime.package.engine_file import Sizes as Sizes
from splitc.runtime.package.engine_file import Weight as Weight
from splitc.runtime.package.states import KeptRows, Length, Preamble, State
from splitc.runtime.package.steps import Run, Step
from splitc.runtime.units import plural

SCHEMA = 4
# What this version reads.
READ = (3, SCHEMA)


class Fill(Struct, frozen=True):
    """How to generate an array for an input.

    `normal`: normally distributed numbers. `randint`: random integers from `low` to before `high`. `arange`: numbers
    that count up along the last axis, modulo `high` unless that is 0.
    """

    kind: Literal["normal", "ones", "zeros", "arange", "randint"]
    low: int = 0
    high: int = 0


class Role(Struct, frozen=True):
    """The meaning of an input.

    `kind` is `indices` (of a table of `rows` rows), `positions` (of a table, if `rows` is not 0), `mask` (an attention
    mask is computed from it), `padding` (the same, and true for what is hidden) or `bias` (it is added to attention
    scores unchanged). A mask is `counted` if only the number of its ones and its length are read.
    """

    kind: str
    rows: int = 0
    counted: bool = False


# A shape in the model's file: a dimension is a number, a symbol, or None if unknown. None as a whole is any shape.
Shape = list[int | str | None] | None


class Tensor(Struct, frozen=True):
    """An input or output of the model. `dtype` is numpy's name.

    `sample_shape` are the planned sizes: a number for every dimension. Engines take sizes from `min_shape` to
    `max_shape`; None is no limit beyond `shape`.
    """

    name: str
    dtype: str
    shape: Shape
    sample_shape: list[int] | None = None
    fill: Fill | None = None
    min_shape: list[int] | None = None
    max_shape: list[int] | None = None
    role: Role | None = None


def of_role(inputs: Sequence[Tensor], role: str) -> list[Tensor]:
    """The inputs of a role."""
    return [tensor for tensor in inputs if tensor.role is not None and tensor.role.kind == role]


class Slot(Struct, frozen=True):
    """A layer's place for adapters: optional inputs A, [inputs, rank], and B, [rank, outputs].

    `names` are the layer's names in adapter files. input x A x B x `factor` is added to the layer's output. A
    convolution has a `kernel`: its A is [rank, inputs, ...] with the kernel's sizes, its B [outputs, rank, ...] with
    ones.
    """

    names: list[str]
    inputs: int
    outputs: int
    a: Tensor
    b: Tensor
    factor: float = 1.0
    kernel: list[int] = []


def slot_tensors(slots: Sequence[Slot]) -> list[Tensor]:
    """A and B of all slots."""
    return [tensor for slot in slots for tensor in (slot.a, slot.b)]


class FixedInput(Struct, frozen=True):
    """An input of the model that no rank takes: fixed to `value`, or unused (None).

    Requests may omit it. If they feed it, it must fit, and is ignored.
    """

    name: str
    dtype: str
    shape: Shape
    value: Any = None


class AxisPart(Struct, frozen=True):
    """A shard of an axis. The axis is a product of factors of these `sizes`, major first (-1: inferred).

    `ranges` are the shard's indices of each factor, from the first to before the last; None is all. An axis of several
    sections is one factor. `places` are then the shard's elements of it, as runs from the first to before the last.
    """

    axis: int
    sizes: list[int]
    ranges: list[tuple[int, int] | None]
    places: list[tuple[int, int]] = []


class Part(Struct, frozen=True):
    """The shard of an input or output of the model that a rank takes or returns."""

    name: str
    axes: list[AxisPart]


class Override(Struct, frozen=True):
    """An optional input as a rank's engines take it: it replaces their weight `value`.

    `places` are the rank's elements along each sharded axis, as runs from the first to before the last.
    """

    input: str
    value: str
    places: dict[int, list[tuple[int, int]]] = {}


class Rank(Struct, frozen=True):
    """One rank: its device, what it loads and runs, and its predicted memory, in bytes.

    - `parts`: the shards of inputs and outputs that it takes or returns.
    - `overrides`: the optional inputs that replace its weights.
    - `keeps`: outputs that it keeps for its states, while another rank returns them to the caller.
    - `total_bytes`: the peak, loading included, which may be more than the sum of the others.
    - `limit_bytes`: the limit for its engines' weights and values, if the rank has a budget.
    - `engine_bytes`: the engines' own memory. `mapped_bytes`: weights of which a few rows are read from a mapped file.
    - `passed_bytes`: the activations that its engines take and return. `adapter_bytes`: needed only with adapters.
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
    limit_bytes: int | None = None
    engine_bytes: int = 0
    mapped_bytes: int = 0
    passed_bytes: int | None = None
    adapter_bytes: int = 0

    @property
    def loaded_bytes(self) -> int:
        """The predicted memory before the first request: weights, and the engines' own."""
        return self.weights_bytes - self.mapped_bytes + self.engine_bytes


def is_fed(rank: Rank) -> bool:
    """Whether a rank takes inputs, or values between its engines' runs; if not, collectives inside bring its data."""
    return bool(rank.inputs) or any(not isinstance(step, Run) for step in rank.program)


class Cut(Struct, frozen=True):
    """The values that cross a cut, and their bytes per run. A `detour` is between the rank after it and all others."""

    values: list[str]
    bytes: int
    detour: bool = False


class Source(Struct, frozen=True):
    """The model that the package was made from. `sha256` is the hash of its ONNX file, without external data."""

    name: str
    sha256: str


# The least bytes of a weight that is listed, and compared with other modules' weights. A choice: it keeps biases and
# norms out of plan.json and the manifest. Sums in plans count all weights.
LISTED = 64 << 10


class UnsplitWeight(Struct, frozen=True):
    """A weight that the split mode could not split completely: its unsplit bytes and the reason."""

    name: str
    bytes: int
    reason: str


class File(Struct, frozen=True, omit_defaults=True):
    """A file of the package, with its size and hash, which are verified before it is loaded.

    Packages of schema 3 have SHA-256. A hard link to the model's own data has no hash, since reading the data would
    take as long as copying it, but the file's `inode` and the time when it was `modified`, in nanoseconds.
    """

    path: str
    bytes: int
    sha256: str | None = None
    blake3: str | None = None
    inode: int | None = None
    modified: int | None = None

    @property
    def hash(self) -> str | None:
        """The hash that it has."""
        return self.blake3 or self.sha256


class Replica(Struct, frozen=True):
    """One of several groups of ranks, each of which has the whole model: the devices of its ranks, in their order.

    It computes its `share` of a request's rows, on any scale. The bytes are what its ranks hold with these: see Rank.
    """

    devices: list[str]
    share: float
    activation_bytes: list[int]
    cache_bytes: list[int]
    total_bytes: list[int]


class MergedAdapter(Struct, frozen=True):
    """An adapter that is merged into the weights: its file's name, its scale, and the number of layers changed."""

    name: str
    scale: float
    layers: int


class Manifest(Struct, frozen=True):
    """All that the runtime knows about a package.

    - `threads`: those of each CPU device; None divides the cores. `build`: set for engines built from ONNX files.
    - `fixed`: inputs of the model that the package does not have. `optional`: inputs with default values in the
      engines.
    - `lengths`: inputs that only the ranks have. `preamble`: a graph that is run before the ranks. `kept_rows`: the
      input by which requests choose the tokens whose logits are computed.
    - `batch`: the number of the batch axis, by input and output that has one; None if there are none.
    - `row_sources`: inputs that have every row of the batch. If it has several, other inputs may have one row for all.
    - `shared_sizes`: symbols with one size each in a request, which ranks read off any value.
    - `filled_sizes`: symbols that must not be 0, since ONNX Runtime would end the process.
    - `unset`: outputs of which the model sets only the rows that are filled. The others are not compared.
    - `replicas`: groups of ranks that divide the rows of a batch. `ranks` are then the first one's; the others run the
      same files. If there are no replicas, all ranks are one group.
    - `merged`: adapters in the weights. `slots`: places for adapters of requests. `most_rank`: the total rank that
      their sums may have at a time, if budgets limit it.
    - `maps_weights`: CPU devices map weights from files.
    - `onnxruntime`: the version that loaded the ONNX files when the package was compiled.
    - `sha256`: the hash of its file, which tells one package from another; empty until it is written.
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
    shared_sizes: list[str] = []
    filled_sizes: list[str] = []
    unset: list[str] = []
    lengths: list[Length] = []
    replicas: list[Replica] = []
    row_sources: list[str] = []
    merged: list[MergedAdapter] = []
    slots: list[Slot] = []
    maps_weights: bool = False
    preamble: Preamble | None = None
    kept_rows: KeptRows | None = None
    most_rank: int | None = None
    onnxruntime: str = ""
    sha256: str = ""

    def __repr__(self) -> str:
        ranks = plural(len(self.devices), "rank")
        return f"<Manifest of {self.source.name}: {self.split_mode} mode, {ranks}, {self.engine} engines>"

    @property
    def devices(self) -> list[str]:
        """The devices of all ranks, one replica after the other."""
        if not self.replicas:
            return [rank.device for rank in self.ranks]
        return [device for replica in self.replicas for device in replica.devices]

    @property
    def engines(self) -> list[EngineFile]:
        """The engines of all ranks."""
        return [engine for rank in self.ranks for engine in rank.engines]

    @property
    def added(self) -> list[str]:
        """The ranks' inputs that are not the model's: lengths, outputs of the preamble, and kept rows."""
        lengths = [name for length in self.lengths for name in length.names]
        computed = [] if self.preamble is None else self.preamble.outputs
        return [*lengths, *computed, *([] if self.kept_rows is None else [self.kept_rows.input])]

    @property
    def masks(self) -> frozenset[str]:
        """The ranks' inputs that a request may omit."""
        return frozenset(() if self.preamble is None else (*self.preamble.masks, *self.preamble.blanks))

    @property
    def overridable(self) -> list[Tensor]:
        """The inputs that replace weights of engines: optional ones, and those of slots."""
        return [*self.optional, *slot_tensors(self.slots)]

    @property
    def omittable(self) -> list[Tensor]:
        """The inputs that requests may omit: those with default values in the engines, and the tokens to keep."""
        kept = self.kept_rows
        return [*self.optional, *([] if kept is None else [Tensor(kept.input, "int64", [kept.input])])]

    @property
    def slot_inputs(self) -> frozenset[str]:
        """The names of the slots' inputs."""
        return frozenset(tensor.name for tensor in slot_tensors(self.slots))

    @property
    def tensors(self) -> dict[str, Sequence[Tensor | FixedInput]]:
        """All tensors that requests give or get, by kind. Fixed inputs may be given, and change nothing."""
        return {
            "input": self.inputs,
            "optional input": self.omittable,
            "bound input": [tensor for tensor in self.fixed if tensor.value is not None],
            "ignored input": [tensor for tensor in self.fixed if tensor.value is None],
            "output": self.outputs,
        }

    @property
    def resident_states(self) -> list[State]:
        """The states that stay on the ranks in a sequence: every rank that takes them also computes them."""
        resident = []
        for state in self.states:
            takers = [rank for rank in self.ranks if state.input in rank.inputs]
            if takers and all(state.output in (*rank.outputs, *rank.keeps) for rank in takers):
                resident.append(state)
        return resident
