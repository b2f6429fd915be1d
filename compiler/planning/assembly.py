"""Puts a plan together, with its warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.analysis.memory import StageMemory, adapter_bytes
from splitc.compiler.analysis.passed_types import check_passed
from splitc.compiler.operators.row_groups import inside_experts
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.rank_plan import CutPlan, RankPlan
from splitc.compiler.planning.resources import Budget, is_limited
from splitc.compiler.planning.split import Split
from splitc.compiler.request.request import DISK, Request
from splitc.compiler.sharding.report import WeightSplit, warn_if_little_split
from splitc.runtime.engines.kinds import ONNXRUNTIME, choose_engine, has_collectives, has_gpu_each
from splitc.runtime.errors import DoesNotFitError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.profiles import PROFILES
from splitc.runtime.package.mode_words import words_of
from splitc.runtime.units import first_few, format_bytes


@dataclass(frozen=True)
class CpuEngine:
    """Bytes of ONNX Runtime on a CPU rank, beside weights and computed values.

    Measured on 90 graphs of 2 to 1,840 nodes, as the memory of loading and a first run beside weights and computed
    values: 9 to 20 MiB.

    - `library`: the pages of its code and tables that are read.
    - `session`: the first session. `further`: another one, without its nodes, 0.1 to 0.3 MiB.
    - `node`: a node in a session.
    - `few_bits`: kernels for weights of less than 32 bits, or casts of these, which are read beside those for 32.
    - `sum`: an all-reduce inside an engine. It takes as much as eight nodes, including nodes that cut and pad for it.
    - `met`: the most for each rank that exchanges values inside engines, itself included: memory that processes share
      for it (STAGING in runtime/collectives/meeting.py, and the queues of native/transfers.c). They touch as much as
      they exchange.
    - `error`: the share by which all predictions are raised.
    """

    library: int = 9 << 20
    session: int = 2 << 20
    further: int = 256 << 10
    node: int = 5 << 10
    few_bits: int = 1 << 20
    sum: int = 40 << 10
    met: int = 1 << 20
    error: float = 0.01


CPU_ENGINE = CpuEngine()
NO_MEMORY = StageMemory(0, 0, 0)


def assemble(
    analysis: Analysis,
    request: Request,
    split: Split,
    ranks: Sequence[RankPlan],
    cuts: Sequence[CutPlan],
    weights: Sequence[WeightSplit] = (),
) -> Plan:
    """The plan of these ranks, with its warnings. Raises ModelError for a value that can't be passed on."""
    for cut in cuts:
        check_passed("value that crosses a cut", cut.values)
    engine = choose_engine(request.engine, [rank.device for rank in ranks])
    ranks = [
        replace(rank, limited=is_limited(rank.device, request.memory))
        for rank in _with_sessions(ranks, cuts, engine, split, words_of(request.split_mode).is_radial)
    ]
    if request.weights_at == DISK:
        ranks = list(map(_with_mapped, ranks))
    warnings = (*plan_warnings(analysis, ranks), *warn_if_little_split(weights, split.whole))
    return Plan(
        analysis,
        request.split_mode,
        split,
        engine,
        request.objective,
        request.profile,
        tuple(ranks),
        tuple(cuts),
        tuple(weights),
        warnings,
        weights_at=request.weights_at,
    )


def _with_sessions(
    ranks: Sequence[RankPlan], cuts: Sequence[CutPlan], engine: str, split: Split, is_radial: bool
) -> tuple[RankPlan, ...]:
    """The ranks with the memory of their engines' libraries, including engines with slots for adapters.

    On CPUs, it includes the error of predictions. For `is_radial` see `ModeWords`.
    """
    inside = has_collectives(engine, [rank.device for rank in ranks])
    crossing = [*split.exchanged(cuts), *(cut.bytes for cut in cuts if cut.detour)] if split.collectives else []
    made = []
    for rank in ranks:
        more, memory = split.more_sessions(rank, inside), rank.memory
        met = [other.device for other in ranks if other.replica == rank.replica]
        by_nccl = bool(crossing) and not (inside or is_radial)
        own = engine_bytes(rank.device, met, engine, more or 1, memory, crossing, by_nccl)
        # Several engines of a rank have a session each, and share no weights.
        adapters = adapter_bytes(memory, packs=rank.device.kind == "cpu" or bool(more))
        slotted = slotted_bytes(rank.device, engine, more, memory.nodes) if memory.sums else 0
        margin = int((memory.values + own) * CPU_ENGINE.error) if rank.device.kind == "cpu" else 0
        made.append(replace(rank, memory=replace(memory, engines=own + margin, adapters=adapters + slotted)))
    return tuple(made)


def _with_mapped(rank: RankPlan) -> RankPlan:
    """A rank with weights in mapped files, if its device is a CPU. Nothing is packed while loading either."""
    if rank.device.kind != "cpu":
        return rank
    before, loading = rank.memory, rank.memory.loading
    memory = replace(before, in_files=before.weights - loading.made, loading=replace(loading, most=loading.optimizing))
    less = adapter_bytes(before, packs=True) - adapter_bytes(memory, packs=True)
    return replace(rank, memory=replace(memory, adapters=before.adapters - less))


def search_budget(request: Request, device: Device, budget: Budget) -> Budget:
    """The budget of a device in the search over cuts: none if its weights, which usually fill it, take no memory.

    On CPUs, it is reduced by the error of predictions.
    """
    if device.kind != "cpu" or budget is None:
        return budget
    return None if request.weights_at == DISK else int(budget / (1 + CPU_ENGINE.error))


def engine_bytes(
    device: Device,
    met: Sequence[Device],
    engine: str,
    sessions: int = 1,
    memory: StageMemory = NO_MEMORY,
    crossing: Sequence[int] = (),
    by_nccl: bool = False,
) -> int:
    """The bytes of a rank's sessions, beside weights and computed values, and of NCCL.

    Several engines of a rank have one session each. A single engine on a GPU has two, which count as one. The headroom
    covers TensorRT's own memory.

    - `met`: the devices with which it exchanges values, including its own. If values are `crossing` inside engines,
      whose bytes these are, all GPUs of a host are connected to each other; else only neighbours.
    - `by_nccl`: NCCL itself adds values, which takes more memory, not kernels in engines.
    - `memory`: the rank's. On a CPU the bytes depend on its number of nodes.
    """
    if device.kind != "cuda":
        if engine != ONNXRUNTIME:
            return 0
        own = CPU_ENGINE.library + CPU_ENGINE.session + (sessions - 1) * CPU_ENGINE.further
        shared = len(met) * min(CPU_ENGINE.met, sum(crossing))
        own += memory.nodes * CPU_ENGINE.node + memory.few_bits * CPU_ENGINE.few_bits
        return own + len(crossing) * CPU_ENGINE.sum + shared
    profile = PROFILES[device.kind]
    # TensorRT's context is in the headroom. NCCL's memory is the same for both engines.
    own = profile.library_bytes + sessions * profile.engine_bytes if engine == ONNXRUNTIME else 0
    if not has_gpu_each(met):
        return own
    beside = sum(other.host == device.host for other in met) if crossing else 0
    own += profile.communicator_bytes + (profile.sum_bytes if by_nccl else 0)
    return own + max(0, beside - 2) * profile.peer_bytes


def slotted_bytes(device: Device, engine: str, more: int, nodes: int) -> int:
    """The bytes of the sessions of engines with slots for adapters, beside those of the engines without."""
    if engine != ONNXRUNTIME:
        return 0
    if device.kind != "cuda":
        return (more or 1) * CPU_ENGINE.session + nodes * CPU_ENGINE.node
    return (more or 2) * PROFILES[device.kind].engine_bytes


DOES_NOT_RUN = "the model does not run with the planned sizes and made-up numbers"


def why_not_run(analysis: Analysis) -> str | None:
    """Why the model does not run with the planned sizes; None if it does."""
    problem = analysis.fitted.problem
    return None if problem is None else problem.splitlines()[0]


# The domain of convolutions whose weights are in the blocks of one kind of CPU (ORT_ENABLE_ALL).
FOR_ONE_CPU = "com.microsoft.nchwc"


def plan_warnings(analysis: Analysis, ranks: Sequence[RankPlan]) -> list[str]:
    """Reasons why the plan's numbers may be wrong, or why little can be split."""
    warnings = []
    if any(node.domain == FOR_ONE_CPU for node in analysis.graph.nodes):
        warnings.append(
            f"ONNX Runtime has optimized this file for one machine's CPU ({FOR_ONE_CPU}): little of it can be split, "
            "and no GPU runs it. Compile the model from before that, or one saved at the level ORT_ENABLE_EXTENDED"
        )
    if observed := sorted(analysis.costs.bound.observed):
        warnings.append(
            f"splitc has no shape rule for {', '.join(observed)} as used here: shapes were observed in ONNX Runtime"
        )
    gone = {value.name for value in inside_experts(analysis.graph.graph)}
    if uncertain := sorted(analysis.costs.bound.uncertain - gone):
        warnings.append(
            f"the sizes of {len(uncertain)} values depend on data ({uncertain[0]}, ...): predicted memory and time are "
            "too low"
        )
    if (why := why_not_run(analysis)) is not None:
        warnings.append(
            f"{DOES_NOT_RUN}. If it takes other sizes, predicted memory and time are wrong: give them (--shapes). "
            f"If it takes other numbers, compile with these (--fill). {why}"
        )
    for merged in analysis.merged:
        if left_out := merged.matches.unmatched:
            module, why = next(iter(left_out.items()))
            warnings.append(
                f"{len(left_out)} of {len(merged.adapter.updates)} updates of the adapter {merged.adapter.name} are "
                f"left out, such as '{module}': {why}"
            )
    if analysis.slot_rank is not None and not analysis.slots:
        why = next(iter(analysis.slotless.values()), "it has no matmuls with weights")
        warnings.append(f"--lora-slots has no effect, since no layer of the model takes adapters: {why}")
    return [*warnings, *memory_warnings(ranks)]


def memory_warnings(ranks: Sequence[RankPlan]) -> list[str]:
    """That some of the ranks have no budget, which was not given."""
    unknown = list(dict.fromkeys(str(rank.device) for rank in ranks if rank.budget is None))
    if not unknown:
        return []
    return [
        f"memory was not checked for {first_few(unknown)}, which this machine does not have: give its budget, as in "
        f"--memory {unknown[0]}=40GiB"
    ]


def check_memory(plan: Plan) -> None:
    """Raise DoesNotFitError for the rank that lacks the most bytes."""
    lacking, number = max((rank.missing, number) for number, rank in enumerate(plan.ranks))
    if not lacking:
        return
    rank = plan.ranks[number]
    unsplit = format_bytes(sum(weight.whole for weight in plan.weights))
    why = f"; {unsplit} of weights can't be split and are {plan.split.whole}" if plan.weights else ""
    lines = [
        f"  rank {n} {r.device}: {format_bytes(r.memory.total)} of {format_bytes(r.budget)}"
        for n, r in enumerate(plan.ranks)
    ]
    raise DoesNotFitError(
        f"rank {number} ({rank.device}) needs {format_bytes(rank.memory.total)} and may use "
        f"{format_bytes(rank.budget)}, {format_bytes(lacking)} short{why}:\n"
        + "\n".join(lines)
        + "\nGive the devices more memory (--memory, --headroom), add one (-d), give this one a smaller share "
        "(--tensor-split), or plan for smaller inputs (--shapes)."
    )
