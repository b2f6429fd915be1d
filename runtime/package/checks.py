"""Checks of a manifest before anything is loaded, so that no rank waits for ever.

Each check is a generator of what is wrong.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import PurePosixPath, PureWindowsPath

import numpy as np

from splitc.runtime.arrays.array import bytes_of
from splitc.runtime.arrays.onnx_types import KNOWN
from splitc.runtime.hardware.devices import MOST_THREADS
from splitc.runtime.package import fused, products
from splitc.runtime.package.manifest import AxisPart, Manifest, Part, Rank, Tensor
from splitc.runtime.package.steps import Receive, Reduce, Run, Send, Step


def find_contradiction(manifest: Manifest) -> str | None:
    """The first contradiction in the manifest; None if there is none."""
    checks = (
        _threads,
        _files,
        _weights,
        _operators,
        _names,
        _of_ranks,
        _states,
        _groups,
        _programs,
        _exchanges,
        _parts,
        _replicas,
        _preamble,
        _kept_rows,
    )
    return next(chain.from_iterable(check(manifest) for check in checks), None)


def _threads(manifest: Manifest) -> Iterator[str]:
    if manifest.threads is not None and not 1 <= manifest.threads <= MOST_THREADS:
        yield f"it has {manifest.threads:,} threads for each CPU device, of which there may be {MOST_THREADS:,}"


def _files(manifest: Manifest) -> Iterator[str]:
    """Engines lie inside the package, and their files are among the verified ones."""
    for path, count in Counter(file.path for file in manifest.files).items():
        if not is_inside(path):
            yield f"the file '{path}' lies outside the package"
        if count > 1:
            yield f"the file '{path}' is there {count} times"
    listed = {file.path for file in manifest.files}
    is_built = manifest.build is None or manifest.build.built is not None
    for number, engine in ((number, engine) for number, rank in enumerate(manifest.ranks) for engine in rank.engines):
        if not is_inside(engine.path):
            yield f"the engine '{engine.path}' lies outside the package"
        elif PurePosixPath(engine.path).parts[0] != f"rank{number}":  # another rank's would wait for this one
            yield f"rank {number} has the engine '{engine.path}', which is not in the folder rank{number}"
        wanted = [engine.path] if is_built else []
        for path in [*wanted, *filter(None, (engine.source, engine.adapted, engine.unmasked))]:
            if path not in listed:
                yield f"the engine's file '{path}' is not among its files"


def _preamble(manifest: Manifest) -> Iterator[str]:
    """The preamble's files are among the verified ones, and its inputs exist."""
    if (preamble := manifest.preamble) is None:
        return
    for path in filter(None, (preamble.file, preamble.plain)):
        if not is_inside(path) or path not in {file.path for file in manifest.files}:
            yield f"the preamble '{path}' is not among its files"
    there = {tensor.name for tensor in manifest.inputs} | {name for own in manifest.lengths for name in own.names}
    for name in (*preamble.inputs, *preamble.consumed, *preamble.ones):
        if name not in there:
            yield f"the preamble takes '{name}', which is no input"
    lengths = {length.input for length in manifest.lengths}
    for name, length in preamble.masks.items():
        if name not in preamble.outputs or length not in lengths:
            yield f"the preamble does not make the mask '{name}', or '{length}' is no input for a length"
    for name, window in preamble.windows.items():
        if name not in preamble.masks or window < 1:
            yield f"the window of {window} tokens is of '{name}', which is no mask, or it is below 1"
    for name in preamble.blanks:
        if name not in preamble.outputs:
            yield f"the preamble does not make '{name}', which says what rows are zeros"
    for engine in manifest.engines:
        if not manifest.masks.isdisjoint(engine.inputs) and engine.unmasked is None:
            yield f"the engine '{engine.path}' has no form without masks"


def _weights(manifest: Manifest) -> Iterator[str]:
    """Weights lie in files of the package, within the files' sizes."""
    sizes = {file.path: file.bytes for file in manifest.files}
    for engine in manifest.engines:
        for weight in engine.weights or ():
            path = (PurePosixPath(engine.path).parent / weight.file).as_posix()
            if path not in sizes:
                yield f"the file '{path}' of the weight '{weight.name}' is not among its files"
            elif weight.dtype not in KNOWN or any(size < 0 for size in weight.shape):
                yield f"the weight '{weight.name}' is of type '{weight.dtype}' and shape {weight.shape}"
            elif not 0 <= weight.offset <= sizes[path] - bytes_of(tuple(weight.shape), weight.dtype):
                yield f"the weight '{weight.name}' ends outside of its file '{path}', which has {sizes[path]:,} bytes"


def _operators(manifest: Manifest) -> Iterator[str]:
    """Kernels of fused operators compile, and read only their inputs. cuBLAS can compute the products to load ahead."""
    for engine in manifest.engines:
        for kernel in engine.fused:
            for wrong in fused.find_wrong(kernel):
                yield f"the fused operator '{kernel.name}' of '{engine.path}' can't be run: {wrong}"
        for one in engine.products:
            for wrong in products.find_wrong(one):
                yield f"a product of '{engine.path}' can't be computed: {wrong}"


def is_inside(path: str) -> bool:
    """Whether a path, on any system, stays inside the folder that it is relative to."""
    parts = PurePosixPath(path).parts
    if not parts or "\0" in path or "\\" in path or PureWindowsPath(path).drive:
        return False
    return not PurePosixPath(path).is_absolute() and ".." not in parts


def _names(manifest: Manifest) -> Iterator[str]:
    """Inputs and outputs have names of their own and known types, and what has a batch is one of them."""
    if not manifest.ranks:
        yield "it has no ranks"
    of_kinds = {"input": [*manifest.inputs, *manifest.overridable], "output": manifest.outputs}
    known = set(manifest.added)
    for kind, tensors in of_kinds.items():
        known.update(tensor.name for tensor in tensors)
        for name, count in Counter(tensor.name for tensor in tensors).items():
            if count > 1:
                yield f"the {kind} '{name}' is there {count} times"
        for tensor in tensors:
            if tensor.dtype not in KNOWN:
                yield f"'{tensor.name}' has the unknown type '{tensor.dtype}'"
    for name in manifest.batch or {}:
        if name not in known:
            yield f"'{name}', which has a batch, is neither an input nor an output"


def _of_ranks(manifest: Manifest) -> Iterator[str]:
    """Ranks take inputs and give outputs, and each output has a source."""
    inputs = {tensor.name for tensor in (*manifest.inputs, *manifest.overridable)}
    outputs = [tensor.name for tensor in manifest.outputs]
    takes = inputs.union(manifest.added)
    for number, rank in enumerate(manifest.ranks):
        for name in (*rank.inputs, *(override.input for override in rank.overrides)):
            if name not in takes:
                yield f"rank {number} takes '{name}', which is no input"
        for name in rank.outputs:
            if name not in outputs:
                yield f"rank {number} gives '{name}', which is no output"
    given = inputs.union(*(rank.outputs for rank in manifest.ranks))
    for name in outputs:
        if name not in given:
            yield f"no rank gives the output '{name}'"


def _states(manifest: Manifest) -> Iterator[str]:
    """States go from outputs to inputs. Lengths belong to states, and are sizes of inputs."""
    inputs = {tensor.name: tensor.shape for tensor in manifest.inputs}
    known, outputs = inputs.keys() | {t.name for t in manifest.overridable}, {t.name for t in manifest.outputs}
    for state in manifest.states:
        if state.input not in known or state.output not in outputs:
            yield f"the state from '{state.output}' to '{state.input}' is not from an output to an input"
        shape = inputs.get(state.input)
        if state.grows is not None and shape is not None and not 0 <= state.grows < len(shape):
            yield f"the state '{state.input}' grows along axis {state.grows}, and it has {len(shape)} axes"
    states = {state.input for state in manifest.states}
    for length in manifest.lengths:
        if length.input in inputs:
            yield f"'{length.input}' is an input, and a length too"
        if not length.states or not states.issuperset(length.states):
            yield f"the length '{length.input}' is of no states"
        if length.reads is not None:
            yield from _without_axis(f"the length '{length.input}' is read off", length.reads, manifest.inputs)


def _kept_rows(manifest: Manifest) -> Iterator[str]:
    """Rows that a request keeps are those of outputs, and as many as an input has tokens."""
    if (kept := manifest.kept_rows) is None:
        return
    yield from _without_axis(f"the tokens that '{kept.input}' keeps are counted in", kept.reads, manifest.inputs)
    for axis in kept.outputs.items():
        yield from _without_axis(f"'{kept.input}' keeps rows of", axis, manifest.outputs)


def _without_axis(what: str, place: tuple[str, int], tensors: Sequence[Tensor]) -> Iterator[str]:
    name, axis = place
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    if name not in shapes:
        yield f"{what} '{name}', which there is not"
    elif (shape := shapes[name]) is not None and not 0 <= axis < len(shape):
        yield f"{what} axis {axis} of '{name}', which has {len(shape)} axes"


def _groups(manifest: Manifest) -> Iterator[str]:
    """All ranks of a group have the same number of engines with its collectives."""
    counts = Counter(
        (number, tuple(engine.group)) for number, rank in enumerate(manifest.ranks) for engine in rank.engines
    )
    for (number, group), count in counts.items():
        if not group:
            continue
        if number not in group or not _are_ranks(group, manifest):
            yield f"an engine of rank {number} has collectives with the ranks {list(group)}"
        elif unlike := [other for other in group if counts[other, group] != count]:
            who = f"the ranks {list(group)}, and rank {unlike[0]} another number"
            yield f"rank {number} has {count} engines with collectives of {who}"


def _are_ranks(group: Sequence[int], manifest: Manifest) -> bool:
    return len(set(group)) == len(group) and all(0 <= rank < len(manifest.ranks) for rank in group)


def _programs(manifest: Manifest) -> Iterator[str]:
    """Each step's values come from earlier steps."""
    for number, rank in enumerate(manifest.ranks):
        known = set(rank.inputs)
        for place, step in enumerate(rank.program):
            where = f"step {place} of rank {number}"
            if isinstance(step, Run) and not 0 <= step.engine < len(rank.engines):
                yield f"{where} runs engine {step.engine}, and it has {len(rank.engines)}"
                return
            if isinstance(step, Send | Receive):
                other = step.target if isinstance(step, Send) else step.source
                if other == number or not _are_ranks((other,), manifest):
                    yield f"{where} exchanges '{step.value}' with rank {other}"
            if isinstance(step, Reduce) and (number not in step.ranks or not _are_ranks(step.ranks, manifest)):
                yield f"{where} reduces over the ranks {step.ranks}"
            needed, made = _passes(step, rank)
            if missing := [name for name in needed if name not in known]:
                yield f"{where} needs '{missing[0]}', which no step before it makes"
            known.update(made)
        if lost := [name for name in (*rank.outputs, *rank.keeps) if name not in known]:
            yield f"no step of rank {number} makes '{lost[0]}', which it gives or keeps"


def _passes(step: Step, rank: Rank) -> tuple[Sequence[str], Sequence[str]]:
    """The values that a step reads and makes."""
    if isinstance(step, Run):
        return rank.engines[step.engine].inputs, rank.engines[step.engine].outputs
    if isinstance(step, Reduce):
        return step.parts, step.wholes
    return ([step.value], []) if isinstance(step, Send) else ([], [step.value])


@dataclass(frozen=True)
class _Collective:
    """A step that ends once all of these ranks have come to it: a reduction, or a run of engines with collectives."""

    what: str
    ranks: tuple[int, ...]


def _exchanges(manifest: Manifest) -> Iterator[str]:
    """The ranks' programs end: their exchanges are simulated, without the engines."""
    left = [deque(_waits(rank)) for rank in manifest.ranks]
    sent: dict[tuple[int, int], deque[str]] = {}
    while any(left):
        moved = [number for number in range(len(left)) if left[number] and _walk(number, left, sent)]
        if not moved:
            number = next(number for number, steps in enumerate(left) if steps)
            yield f"rank {number} waits for ever: {_describe(left[number][0])}"
            return
    for (source, target), values in sent.items():
        if values:
            yield f"rank {source} sends '{values[0]}' to rank {target}, which does not receive it"


def _waits(rank: Rank) -> Iterator[Send | Receive | _Collective]:
    """The steps in which a rank may wait for others, or others for it."""
    for step in rank.program:
        if isinstance(step, Reduce):
            yield _Collective(f"the {step.operation} of {', '.join(step.wholes)}", tuple(step.ranks))
        elif not isinstance(step, Run):
            yield step
        elif group := rank.engines[step.engine].group:
            yield _Collective("the run of engines with collectives", tuple(group))


def _walk(
    number: int, left: Sequence[deque[Send | Receive | _Collective]], sent: dict[tuple[int, int], deque[str]]
) -> bool:
    """Take the next step of a rank, unless it must wait. Returns whether it was taken."""
    step = left[number][0]
    if isinstance(step, _Collective):
        if any(not left[rank] or left[rank][0] != step for rank in step.ranks):
            return False
        for rank in step.ranks:
            left[rank].popleft()
        return True
    if isinstance(step, Receive):
        waiting = sent.get((step.source, number))
        if not waiting or waiting[0] != step.value:
            return False
        waiting.popleft()
    else:
        sent.setdefault((number, step.target), deque()).append(step.value)
    left[number].popleft()
    return True


def _describe(step: Send | Receive | _Collective) -> str:
    if isinstance(step, Receive):
        return f"rank {step.source} does not send it '{step.value}'"
    assert isinstance(step, _Collective)
    return f"not all of the ranks {list(step.ranks)} come to {step.what}"


def _parts(manifest: Manifest) -> Iterator[str]:
    """All shards of an array are cut in the same way, and those of an output cover it."""
    tensors = {tensor.name: tensor for tensor in (*manifest.outputs, *manifest.inputs, *manifest.optional)}
    for number, rank in enumerate(manifest.ranks):
        for name, count in Counter(part.name for part in rank.parts).items():
            if name not in (*rank.inputs, *rank.outputs, *rank.keeps):
                yield f"rank {number} has a shard of '{name}', which it neither takes nor gives"
            if count > 1:
                yield f"rank {number} has {count} shards of '{name}'"
        for part in rank.parts:
            if len({axis.axis for axis in part.axes}) != len(part.axes):
                yield f"rank {number} has a shard of '{part.name}' that is cut twice along an axis"
            for axis in part.axes:
                if not _is_cut(axis, tensors.get(part.name)):
                    yield f"rank {number} has no possible shard of '{part.name}', axis {axis.axis}"
    for tensor in manifest.outputs:
        givers = [rank for rank in manifest.ranks if tensor.name in rank.outputs]
        parts = [part for rank in givers for part in rank.parts if part.name == tensor.name]
        if parts and (len(parts) != len(givers) or not _cover(parts)):
            yield f"the ranks' shards of the output '{tensor.name}' do not cover it"


def _replicas(manifest: Manifest) -> Iterator[str]:
    """Each replica has one device for each rank, and the first one has the ranks' devices."""
    for number, replica in enumerate(manifest.replicas):
        for own in (replica.devices, replica.activation_bytes, replica.cache_bytes, replica.total_bytes):
            if len(own) != len(manifest.ranks):
                yield f"replica {number} has {len(own)} entries for {len(manifest.ranks)} ranks"
        if not 0 < replica.share < math.inf:
            yield f"replica {number} has the share {replica.share}"
    if manifest.replicas and manifest.batch is None:
        yield "it has replicas, and no axis of rows that they could divide"
    if manifest.replicas and manifest.replicas[0].devices != [rank.device for rank in manifest.ranks]:
        yield "its first replica has other devices than its ranks"


def _is_cut(axis: AxisPart, tensor: Tensor | None) -> bool:
    """Whether the planned shape has this shard. The shapes of a preamble's outputs are not known."""
    if tensor is not None and tensor.sample_shape is not None:
        if not 0 <= axis.axis < len(tensor.sample_shape):
            return False
        known = math.prod(size for size in axis.sizes if size != -1)
        length = tensor.sample_shape[axis.axis]
        if known <= 0 or (length % known if -1 in axis.sizes else length != known):
            return False
    if axis.places:
        ends = [end for run in axis.places for end in run]
        is_one = len(axis.sizes) == 1 and axis.ranges == [None] and axis.sizes != [-1]
        is_in_order = ends == sorted(ends) and all(a < b for a, b in axis.places)
        return is_one and is_in_order and ends[0] >= 0 and ends[-1] <= axis.sizes[0]
    return (
        len(axis.sizes) == len(axis.ranges)
        and axis.sizes.count(-1) <= 1
        and all(size > 0 or size == -1 for size in axis.sizes)
        and all(
            part is None or (size != -1 and 0 <= part[0] < part[1] <= size)
            for size, part in zip(axis.sizes, axis.ranges, strict=True)
        )
    )


def _cover(parts: Sequence[Part]) -> bool:
    """Whether the shards together are the whole array."""
    if len({tuple((axis.axis, *axis.sizes) for axis in part.axes) for part in parts}) != 1:
        return False
    sizes = [abs(size) for axis in parts[0].axes for size in axis.sizes]
    runs = [_runs(part, sizes) for part in parts]
    # Cells between the places where some shard begins or ends, along each factor of each axis.
    ends = [
        sorted({0, size, *chain.from_iterable(run for own in runs for run in own[n])}) for n, size in enumerate(sizes)
    ]
    covered = np.zeros([len(places) - 1 for places in ends], bool)
    for own in (block for blocks in runs for block in product(*blocks)):
        covered[tuple(slice(ends[n].index(a), ends[n].index(b)) for n, (a, b) in enumerate(own))] = True
    return bool(covered.all())


def _runs(part: Part, sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """A shard's runs of elements along each factor of its axes, which have these sizes."""
    given: list[Sequence[tuple[int, int] | None]] = [axis.places or [own] for axis in part.axes for own in axis.ranges]
    return [[run or (0, size) for run in own] for own, size in zip(given, sizes, strict=True)]
