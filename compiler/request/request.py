"""A user's request for a plan.

To add an option, add a field. This module imports none of the compiler's libraries, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from splitc.compiler.request.option import KEY, Option, as_given, request_field
from splitc.compiler.request.places import ExpertsPlace, Place, parse_experts, parse_places
from splitc.compiler.request.shapes import AskedShapes, AskedStates, checked_shapes, parse_states
from splitc.runtime.adapters.asked import parse_adapters
from splitc.runtime.arrays.settings import parse_settings
from splitc.runtime.engines.kinds import PACKAGES, find_kind
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.asked_shapes import Shape, parse_shapes
from splitc.runtime.units import parse_bytes, whole_number

# Where the weights of CPU devices are: packed in memory, or in read-only maps of their files.
HOST, DISK = "host", "disk"
OBJECTIVES = ("throughput", "latency")
# Default of --headroom. A choice: memory that other programs may take between the plan and the run.
DEFAULT_HEADROOM = 1 << 30
# Default of --row-min. A choice: smaller matrices hold little, and each costs a send and a receive.
ROW_MIN = 256
# The modes that put weights on other devices than the blocks. Auto mode is layer mode then.
PLACING = ("auto", "layer", "tensor", "batch")
_SHAPES = ("shapes", "min_shapes", "opt_shapes", "max_shapes")
WHY_NOT_PLACED = ": in row mode the main device holds all that is not sliced"


def _read_shares(text: str | None) -> list[float] | None:
    try:
        return [float(share) for share in text.split(",")] if text is not None else None
    except ValueError:
        raise MisuseError(f"can't read --tensor-split '{text}': write one number a device, as in 3,1") from None


def _shapes(flag: str, help: str, planned: Callable[[Any], Any], ranged: bool = True) -> Any:
    read = partial(parse_shapes, option=flag)
    return request_field(None, flag, help=help, kind=list[str], read=read, shown=[], planned=planned, ranged=ranged)


def _used_up(file: Any) -> None:
    """The plan's value of an option that only led to the plan: none."""


@dataclass(frozen=True)
class Request:
    """A user's request for a plan. `splitc plan --help` describes each field as an option.

    - `engine`: None chooses by the devices and by what is installed.
    - `shapes`: the input shapes to plan for, by name. `min_shapes`, `opt_shapes` and `max_shapes`: a range, and the
      shapes to tune for.
    - `tensor_split`: shares on any scale, one for each device.
    - `memory`: budgets as on the command line (`4GiB`, `cpu0=4GiB`). The default is a device's free memory less
      `headroom` bytes.
    - `weights_at`: "disk" leaves weights of CPU devices in mapped files, where they count for no budget.
    - `interconnect`: as on the command line (`25GB/s,5us`).
    - `states`: outputs by the inputs that they replace in the next run. Others are detected unless `no_state`.
    - `lora`: files of adapters to merge, each with its scale. `lora_slots`: the rank of adapters that requests may
      bring.
    - `place`, `experts`: the weights on other devices than the blocks, and these devices.
    - `settings`: binds inputs to constants: one number or boolean for all elements, or nested lists of them.
    """

    split_mode: str = request_field(
        "auto",
        "--split-mode",
        kind=str,
        help="auto: the mode predicted to be best that fits.",
        planned=lambda file: file.split_mode,
    )
    objective: str = request_field(
        "throughput",
        "--objective",
        kind=str,
        help="throughput: minimize the slowest stage's time. latency: the sum of all stages.",
        planned=lambda file: file.objective,
    )
    spread: bool = request_field(
        False, "--spread", kind=bool, help="Use every device, even where fewer would do.", planned=_used_up
    )
    pipeline_stages: int = request_field(
        1,
        "--pipeline-stages",
        minimum=1,
        kind=int,
        help="In tensor mode: how many stages. A stage's devices share its blocks.",
        only=["tensor"],
        why="; layer mode makes a stage for each device",
        planned=lambda file: 1 + max((rank.stage for rank in file.ranks), default=0),
    )
    batch_groups: int = request_field(
        1,
        "--batch-groups",
        minimum=1,
        kind=int,
        help="How many groups of devices. Each has the whole model, and its rows of a batch.",
        planned=lambda file: 1 if file.split_mode == "batch" else file.batch_groups,
    )
    main_device: str | None = request_field(
        None,
        "--main-device",
        kind=str | None,
        help="In row mode: runs the model. Default: the first.",
        only=["row"],
        why="; in other modes no device is the main one",
        planned=lambda file: file.ranks[0].device if file.split_mode == "row" and file.ranks else None,
    )
    row_min: int = request_field(
        ROW_MIN,
        "--row-min",
        minimum=1,
        kind=int,
        help="In row mode: the least side of a matrix that is sliced.",
        only=["row"],
        planned=lambda file: file.row_min,
    )
    fallback: str | None = request_field(
        None,
        "--fallback",
        kind=str | None,
        help="layer: use layer mode if the chosen mode can't split the model. Default: fail.",
        planned=_used_up,
    )
    tensor_split: Sequence[float] | None = request_field(
        None,
        "--tensor-split",
        kind=str | None,
        read=_read_shares,
        help="Each device's share of the weights, in batch mode of the rows, as in 3,1. Default: best for the "
        "objective; in row and tensor mode by budgets, in batch mode by speed.",
        planned=lambda file: None if file.split_mode == "layer" else [rank.share for rank in file.ranks],
    )
    place: Sequence[Place] = request_field(
        (),
        "--place",
        metavar="REGEX=DEVICE",
        kind=list[str],
        read=parse_places,
        shown=[],
        help="Put weights of matching names on a device; the first match counts.",
        only=PLACING,
        why=WHY_NOT_PLACED,
        planned=_used_up,
    )
    experts: ExpertsPlace | None = request_field(
        None,
        "--experts",
        metavar="DEVICE[:LAYERS]",
        kind=str | None,
        read=parse_experts,
        help="Put the experts of all layers, or of the first LAYERS, on a device.",
        only=PLACING,
        why=WHY_NOT_PLACED,
        planned=_used_up,
    )
    memory: Sequence[str] = request_field(
        (),
        "--memory",
        kind=list[str],
        shown=[],
        help="A device's budget, repeatable: cpu0=4GiB, or 4GiB for all. Default: free memory less headroom.",
        planned=lambda file: {rank.device: rank.budget_bytes for rank in file.ranks},
    )
    headroom: int = request_field(
        DEFAULT_HEADROOM,
        "--headroom",
        minimum=0,
        kind=str,
        read=parse_bytes,
        shown="1GiB",
        help="Memory to leave free.",
        planned=_used_up,
    )
    weights_at: str = request_field(
        HOST,
        "--weights-at",
        kind=str,
        help="disk: CPU devices read mapped files.",
        planned=lambda file: file.weights_at,
    )
    interconnect: str | None = request_field(
        None,
        "--interconnect",
        metavar="25GB/s,5us",
        kind=str | None,
        help="Bandwidth and latency between two devices of different hosts. Default: as measured, or typical.",
        planned=_used_up,
    )
    engine: str | None = request_field(
        None,
        "--engine",
        kind=str | None,
        help="onnxruntime, tensorrt or tensorrt-rtx. Default: tensorrt on GPUs if it is installed, else onnxruntime.",
        planned=lambda file: file.engine,
    )
    shapes: Mapping[str, Shape] | None = _shapes(
        "--shapes",
        help="An input's shape to plan for, repeatable: ids:1x16 or ids:[1,16].",
        planned=lambda file: file.shapes,
        ranged=False,
    )
    min_shapes: Mapping[str, Shape] | None = _shapes(
        "--min-shapes",
        help="An input's smallest shape, for TensorRT's engines.",
        planned=lambda file: file.min_shapes or file.shapes,
    )
    opt_shapes: Mapping[str, Shape] | None = _shapes(
        "--opt-shapes",
        help="An input's shape that TensorRT tunes for.",
        planned=lambda file: file.opt_shapes or file.shapes,
    )
    max_shapes: Mapping[str, Shape] | None = _shapes(
        "--max-shapes", help="An input's largest shape, for TensorRT's engines.", planned=lambda file: file.shapes
    )
    settings: Mapping[str, Any] = request_field(
        {},
        "--set",
        metavar="NAME=VALUE",
        kind=list[str],
        read=parse_settings,
        shown=[],
        help="Bind an input to a constant, repeatable, and fold what follows from it: use_cache_branch=true, sr=16000.",
        planned=lambda file: file.settings,
    )
    states: Mapping[str, str] = request_field(
        {},
        "--state",
        metavar="INPUT=OUTPUT",
        kind=list[str],
        read=parse_states,
        shown=[],
        help="A state: the output is the next run's input. Overrides detected ones. Repeatable.",
        planned=lambda file: {state.input: state.output for state in file.states or ()},
    )
    no_state: bool = request_field(
        False,
        "--no-state",
        kind=bool,
        help="Detect no states: only those of --state count.",
        planned=_used_up,
    )
    no_fuse: bool = request_field(
        False,
        "--no-fuse",
        kind=bool,
        help="Leave attention, norms and caches as exported. Default: fused if that is faster in ONNX Runtime.",
        planned=lambda file: not file.fused,
    )
    lora: Sequence[tuple[str, float]] = request_field(
        (),
        "--lora",
        metavar="FILE[:SCALE]",
        kind=list[str],
        read=parse_adapters,
        shown=[],
        help="Merge an adapter (LoRA) into the weights, repeatable.",
        planned=lambda file: tuple((entry.file, entry.scale) for entry in file.lora),
    )
    lora_slots: int | None = request_field(
        None,
        "--lora-slots",
        metavar="RANK",
        minimum=1,
        kind=int | None,
        help="Leave room for requests' adapters, of about this rank.",
        planned=lambda file: file.lora_slots,
    )
    trust_external_data: bool = request_field(
        False,
        "--trust-external-data",
        kind=bool,
        help="Read the model's external data also where links or paths lead out of its folder.",
    )
    profile: bool = request_field(
        False,
        "--profile",
        kind=bool,
        help="Measure each block's time and memory instead of predicting them.",
        planned=_used_up,
    )
    threads: int | None = request_field(
        None, "--threads", minimum=1, kind=int | None, help="Threads of each CPU device. Default: cores divided."
    )

    # These are no options. `stated`: see AskedShapes. `may_copy`: auto mode may give several devices the whole model.
    stated: Mapping[str, Sequence[int | None]] = field(default_factory=dict)
    may_copy: bool = True

    def __post_init__(self) -> None:
        # A single budget, whose letters would be taken for several budgets, and numbers of bytes.
        given = [self.memory] if isinstance(self.memory, str | int) else self.memory
        object.__setattr__(self, "memory", list(map(str, given)))
        places = [self.place] if isinstance(self.place, str) else self.place
        read = [parse_places([place])[0] if isinstance(place, str) else place for place in places]
        object.__setattr__(self, "place", tuple(read))
        if self.tensor_split is not None and not isinstance(self.tensor_split, str):
            object.__setattr__(self, "tensor_split", list(self.tensor_split))  # which may be an array
        for name, option in options_of_requests().items():
            value = _as_on_the_command_line(option, getattr(self, name))
            object.__setattr__(self, name, checked_shapes(option.flag, value) if name in _SHAPES else value)

    @property
    def asked_shapes(self) -> AskedShapes:
        """All shapes that are asked for."""
        return AskedShapes(
            self.shapes or {}, self.min_shapes or {}, self.opt_shapes or {}, self.max_shapes or {}, self.stated
        )

    @property
    def asked_states(self) -> AskedStates:
        """The states that are asked for."""
        return AskedStates(self.states, self.no_state)

    @property
    def places_weights(self) -> bool:
        """Whether it puts weights on other devices than the blocks."""
        return bool(self.place) or self.experts is not None

    def check_modes(self) -> None:
        """Raise MisuseError if an option of another split mode is given."""
        for option in self.foreign_options(self.split_mode).values():
            raise MisuseError(f"{option.flag} is for --split-mode {', '.join(option.only)}{option.why}")

    def foreign_options(self, mode: str) -> dict[str, Option]:
        """The options that are given and belong to another split mode than `mode`, by field."""
        default = Request()
        return {
            name: option
            for name, option in options_of_requests().items()
            if option.only and mode not in option.only and getattr(self, name) != getattr(default, name)
        }

    def in_mode(self, mode: str) -> Request:
        """The request for this split mode, without options of others."""
        default = Request()
        return replace(self, split_mode=mode, **{name: getattr(default, name) for name in self.foreign_options(mode)})

    def check_engine(self, engine: str) -> None:
        """Raise MisuseError for an option of built engines if these are not built, and the other way round."""
        if find_kind(engine).is_built:
            if self.lora_slots is not None:
                raise MisuseError(
                    f"--lora-slots is for ONNX Runtime, and --engine is {engine}: merge adapters with --lora"
                )
            return
        for name, option in options_of_requests().items():
            if option.ranged and getattr(self, name):
                raise MisuseError(
                    f"{option.flag} is for engines that are built for a range of sizes ({', '.join(PACKAGES)}), and "
                    f"--engine is {engine}, which takes any size: give the largest shape by --shapes"
                )

    def planned(self, given: Callable[[str], bool], file: Any) -> Iterator[tuple[str, Any, Any]]:
        """The options that the user gave and a plan's file settles: flag, the user's value and the file's value."""
        for name, option in self.settled(given).items():
            if option.planned is not None:
                yield option.flag, getattr(self, name), option.planned(file)

    def settled(self, given: Callable[[str], bool]) -> dict[str, Option]:
        """The options that the user gave and a plan settles, by field."""
        options = options_of_requests()
        return {name: option for name, option in options.items() if option.planned is not None and given(name)}


def _as_on_the_command_line(option: Option, value: Any) -> Any:
    """A field's value. Text is read as the command line reads it, and numbers have the same limits."""
    if option.kind in (str, str | None) and isinstance(value, str):
        return option.read(value)
    if option.kind == list[str] and option.read is not as_given:
        texts = [value] if isinstance(value, str) else value
        is_text = isinstance(texts, Sequence) and bool(texts) and all(isinstance(text, str) for text in texts)
        return option.read(texts) if is_text else value
    if option.minimum is not None and value is not None:
        return whole_number(option.flag, value, option.minimum)
    return value


def options_of_requests() -> dict[str, Option]:
    """The options by field."""
    return {asked.name: asked.metadata[KEY] for asked in fields(Request) if KEY in asked.metadata}
