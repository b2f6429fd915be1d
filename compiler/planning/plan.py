"""Plan: who holds what, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import StageMemory
from splitc.compiler.frontend.shapes import AskedShapes, Shape
from splitc.compiler.lowering.stages import Stage
from splitc.compiler.sharding.report import SplitWeight, warn_of_little
from splitc.compiler.sharding.row_split import LEAST_SIDE, RowSplit
from splitc.compiler.sharding.sharded_model import TensorSplit
from splitc.runtime.devices import Device
from splitc.runtime.engines.kinds import ONNXRUNTIME, choose_engine
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.units import format_bytes

DEFAULT_HEADROOM = 1 << 30
# Bytes that each of ONNX Runtime's sessions on a GPU takes beside weights and activations, for its libraries and their
# scratch space, as measured on H200s with version 1.31 at the peak of a decoder in tensor mode (20 MiB when it is
# loaded). Those of a rank's only one are left to the headroom.
ENGINE_BYTES = 42 << 20


@dataclass(frozen=True)
class Repeated:
    """What a stage computes again although an earlier one has it, since that is cheaper than to send it.

    The price is `flops` a run and `weights` bytes held twice; what is saved is `unsent` bytes a run.
    """

    nodes: int
    flops: int
    weights: int
    unsent: int


@dataclass(frozen=True)
class RankPlan:
    """One rank: its device, the bytes that it may use (None: unknown), its stage, and what that is predicted to hold.

    Ranks of one `group` share what it runs, each with its own `part`, counted from 0, and a size by its `share` of the
    group's shares. By tensor split they have the same stage; by row split the first has all of the model, and the
    others the products of which they have a slice. `seconds` is the time a run, measured or, as a rule, estimated.
    """

    device: Device
    budget: int | None
    share: float
    stage: Stage
    group: int
    part: int
    memory: StageMemory
    seconds: float
    repeated: Repeated

    @property
    def missing(self) -> int:
        """The bytes that it lacks; 0 where it fits, and where its budget is not known."""
        return 0 if self.budget is None else max(0, self.memory.total - self.budget)


@dataclass(frozen=True)
class CutPlan:
    """What crosses from the stages before a cut to those after it, and its bytes.

    By row split there is one for each rank but the main one: what crosses between the two, both ways.
    """

    values: tuple[ir.Value, ...]
    bytes: int


@dataclass(frozen=True)
class Candidate:
    """One way to use the devices that auto mode tried: seconds a request, and between the outputs of a stream.

    `fullest` is the share of its budget that the fullest device holds at its peak, in bytes where a budget is not
    known; `peaks` are all devices' peaks in bytes. What can't be has `refused`, the reason, instead.
    """

    name: str
    mode: str
    devices: int
    latency: float = 0.0
    interval: float = 0.0
    fullest: float = 0.0
    peaks: Sequence[int] = ()
    refused: str | None = None


@dataclass(frozen=True)
class Plan:
    """The decisions for one model: its ranks in pipeline order, the cuts between them, and what a user should know.

    `tensor` and `rows` say how a group of ranks shares its work, in the modes of these names. In auto mode `candidates`
    are what was compared, and `choice` says what was chosen of them and why.
    """

    analysis: Analysis
    split_mode: str
    engine: str
    objective: str
    profiled: bool
    ranks: tuple[RankPlan, ...]
    cuts: tuple[CutPlan, ...]
    warnings: tuple[str, ...] = ()
    tensor: TensorSplit | None = None
    rows: RowSplit | None = None
    weights: tuple[SplitWeight, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    choice: str | None = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What each group of ranks runs, in pipeline order."""
        return tuple(rank.stage for rank in self.ranks if rank.part == 0)

    @property
    def collectives(self) -> int:
        """How many times a run the ranks of a group bring together what they have."""
        if self.rows is not None:
            return len(self.rows.rounds)
        return self.tensor.choice.sums.count if self.tensor is not None else 0


@dataclass(frozen=True)
class Request:
    """What a user asks of a plan.

    `engine` is the kind of engines; None takes what the devices have. `shapes` are the inputs' to plan for; the other
    three give the ends of a range of them, and the shape to be fast for.
    `tensor_split` gives the devices' shares of the weights on any scale. `memory` is budgets as the command line takes
    them (`4GiB`, `cpu0=4GiB`); without, a device's budget is its free memory less `headroom` bytes. `spread` gives
    every device a stage, even where fewer would do. `profile` measures blocks on the device instead of estimating.
    In tensor mode `pipeline_stages` divides the devices into so many groups, each with a run of blocks. In row mode
    the model runs on the device `main_device` (the first, where none is named), and weights of at least `row_min` x
    `row_min` are sliced. `fallback` is the mode to take instead where the one asked for can't split the model.
    `settings` binds inputs to constants: a number or truth value for all elements, or nested lists of these.
    """

    split_mode: str = "auto"
    objective: str = "throughput"
    engine: str | None = None
    shapes: Mapping[str, Shape] | None = None
    min_shapes: Mapping[str, Shape] | None = None
    opt_shapes: Mapping[str, Shape] | None = None
    max_shapes: Mapping[str, Shape] | None = None
    tensor_split: Sequence[float] | None = None
    memory: Sequence[str] = ()
    headroom: int = DEFAULT_HEADROOM
    spread: bool = False
    profile: bool = False
    threads: int | None = None
    pipeline_stages: int = 1
    main_device: str | None = None
    row_min: int = LEAST_SIDE
    fallback: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asked_shapes(self) -> AskedShapes:
        """All that it says of shapes."""
        given = (self.shapes, self.min_shapes, self.opt_shapes, self.max_shapes)
        return AskedShapes(*(each or {} for each in given))


def assemble(
    analysis: Analysis,
    request: Request,
    ranks: Sequence[RankPlan],
    cuts: Sequence[CutPlan],
    tensor: TensorSplit | None = None,
    rows: RowSplit | None = None,
    weights: Sequence[SplitWeight] = (),
    whole: str = "",
) -> Plan:
    """The plan of these ranks, with what a user should know of it; `whole` is where weights are that are not split."""
    engine = choose_engine(request.engine, [rank.device for rank in ranks])
    plan = Plan(
        analysis,
        request.split_mode,
        engine,
        request.objective,
        request.profile,
        tuple(_with_engines(rank, engine, tensor, rows) for rank in ranks),
        tuple(cuts),
        tensor=tensor,
        rows=rows,
        weights=tuple(weights),
    )
    return replace(plan, warnings=(*plan_warnings(analysis, plan.ranks), *warn_of_little(weights, whole)))


def _with_engines(rank: RankPlan, engine: str, tensor: TensorSplit | None, rows: RowSplit | None) -> RankPlan:
    """The rank with the memory of its engines' libraries, where it has many of them on a GPU."""
    if engine != ONNXRUNTIME or rank.device.kind != "cuda":
        return rank
    more = tensor.choice.sums.count if tensor is not None else 0
    if rows is not None:
        more = 2 * len(rows.rounds) if rank.part == 0 else len(rows.rounds) - 1
    return replace(rank, memory=replace(rank.memory, engines=more * ENGINE_BYTES))


def plan_warnings(analysis: Analysis, ranks: Sequence[RankPlan]) -> list[str]:
    """What makes the plan's numbers less than certain."""
    found = []
    if observed := sorted(analysis.costs.bound.observed):
        found.append(
            f"no rule gives the shapes that {', '.join(observed)} makes here: they were observed, in ONNX Runtime"
        )
    if uncertain := sorted(analysis.costs.bound.uncertain):
        found.append(
            f"the sizes of {len(uncertain)} values depend on data ({uncertain[0]}, ...): memory and time are too low"
        )
    if unknown := [str(rank.device) for rank in ranks if rank.budget is None]:
        found.append(
            f"nothing was checked against a budget for {', '.join(dict.fromkeys(unknown))}: this machine has no such "
            f"device, so give its memory, as in --memory {unknown[0]}=40GiB"
        )
    for number, rank in enumerate(ranks):
        if rank.missing > 0:
            found.append(f"rank {number} needs more than the budget of {rank.device}")
    return found


def check_memory(plan: Plan, where: str) -> None:
    """Raise DoesNotFitError for the rank that lacks most. `where` weights are that can't be split."""
    lacking, number = max((rank.missing, number) for number, rank in enumerate(plan.ranks))
    if not lacking:
        return
    rank = plan.ranks[number]
    whole = sum(each.bytes - each.split for each in plan.weights)
    lines = [
        f"  rank {n} {r.device}: {format_bytes(r.memory.total)} of {format_bytes(r.budget)}"
        for n, r in enumerate(plan.ranks)
    ]
    raise DoesNotFitError(
        f"rank {number} ({rank.device}) needs {format_bytes(rank.memory.total)} and may use "
        f"{format_bytes(rank.budget)}, {format_bytes(lacking)} short; {format_bytes(whole)} of weights can't be split "
        f"and are {where}:\n"
        + "\n".join(lines)
        + "\nGive the devices more memory (--memory, --headroom), add one (-d), give this one a smaller share "
        "(--tensor-split), or plan for smaller inputs (--shapes)."
    )
