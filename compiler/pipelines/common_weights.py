"""Weights that several modules of a folder have in common: found by what they hold, wherever they lie.

To read all weights would take long. So those of equal type and shape are compared by a few bytes first, and only those
that look alike are read.
"""

from __future__ import annotations

import sys
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from blake3 import blake3

from splitc.compiler.packaging.onnx_files import SMALL
from splitc.compiler.planning.plan import Plan
from splitc.compiler.sharding.cut_tensor import CutTensor
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.gpu.weight_places import PASSED_ON

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
# Smaller weights, in bytes, are not worth it.
LEAST = 1 << 16
# Bytes at either end of a weight that are compared first, and bytes that are read at a time.
GLANCE, PIECE = 1 << 12, 1 << 26


@dataclass(frozen=True)
class CommonWeights:
    """The weights that several modules have in common.

    `keys` are by module, by rank, and by the weight's name in the rank's graph. `spared` are the bytes of each device
    that need not be held again, since another module's engine there has them.
    """

    keys: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    spared: Mapping[str, int] = field(default_factory=dict)


NONE = CommonWeights()


def find_common(plans: Mapping[str, Plan], swap: bool = False) -> CommonWeights:
    """The weights of 64 KiB and more that several of these modules have in common, whatever their names and files.

    Ranks of several engines hold theirs inside these, and so do engines with a weight that sessions can't share.
    With `swap` nothing is held beside each other.
    """
    if swap:
        return NONE
    tensors = {name: _large_tensors(plan) for name, plan in plans.items()}
    alike = _in_several(tensors, _glance)
    equal = _in_several({name: [each for each in own if id(each) in alike] for name, own in tensors.items()}, _hash)
    if not equal:
        return NONE
    found = {name: [(each, equal[id(each)]) for each in own if id(each) in equal] for name, own in tensors.items()}
    held = {
        name: [_held(plan, number, _Sources(found[name])) for number in range(len(plan.ranks))] if found[name] else []
        for name, plan in plans.items()
    }
    count = Counter(key for ranks in held.values() for key in {key for rank in ranks for key, _ in rank.values()})
    keys = {
        name: [{weight: key for weight, (key, _) in rank.items() if count[key] > 1} for rank in ranks]
        for name, ranks in held.items()
    }
    return CommonWeights(keys, _spared(plans, held))


def _large_tensors(plan: Plan) -> list[ir.TensorProtocol]:
    """The model's weights that are worth holding once."""
    values = plan.analysis.graph.graph.initializers.values()
    tensors = (value.const_value for value in values if value.const_value is not None)
    return [each for each in tensors if each.dtype != ir.DataType.STRING and each.nbytes >= LEAST]


def _in_several(
    tensors: Mapping[str, Iterable[ir.TensorProtocol]], key_of: Callable[[ir.TensorProtocol], K]
) -> dict[int, K]:
    """The keys of the tensors whose keys several modules have, by the tensors' ids."""
    keys = {name: {id(tensor): key_of(tensor) for tensor in own} for name, own in tensors.items()}
    count = Counter(key for own in keys.values() for key in set(own.values()))
    return {tensor: key for own in keys.values() for tensor, key in own.items() if count[key] > 1}


def _kind(tensor: ir.TensorProtocol) -> str:
    return f"{tensor.dtype.name} {tuple(map(int, tensor.shape.numpy()))}"


def _glance(tensor: ir.TensorProtocol) -> tuple[str, bytes]:
    content = _bytes(tensor)
    return _kind(tensor), content[:GLANCE].tobytes() + content[-GLANCE:].tobytes()


def _hash(tensor: ir.TensorProtocol) -> str:
    """The hash of a tensor's type, shape and content."""
    content, digest = _bytes(tensor), blake3(_kind(tensor).encode(), max_threads=blake3.AUTO)
    for start in range(0, content.size, PIECE):
        digest.update(content[start : start + PIECE].data)
    return digest.hexdigest()


def _bytes(tensor: ir.TensorProtocol) -> npt.NDArray[np.uint8]:
    """The tensor's bytes: those of a file are mapped, and not kept."""
    if isinstance(tensor, ir.ExternalTensor):
        return np.memmap(Path(tensor.path), np.uint8, "r", tensor.offset or 0, (tensor.nbytes,))
    return np.frombuffer(tensor.tobytes(), np.uint8)


class _Sources:
    """A model's tensors that others have too, and their keys. What ranks hold is cut out of these."""

    def __init__(self, found: Sequence[tuple[ir.TensorProtocol, str]]) -> None:
        self._by_id = {id(tensor): key for tensor, key in found}
        self._in_files = sorted(
            (str(tensor.path), tensor.offset or 0, tensor.nbytes, _kind(tensor), key)
            for tensor, key in found
            if isinstance(tensor, ir.ExternalTensor)
        )

    def key(self, tensor: ir.TensorProtocol) -> str | None:
        """The key of one of them, or of a part of one; None for others."""
        if isinstance(tensor, CutTensor):
            return _derived(self.key(tensor.source), tensor, sorted(tensor.places.items()))
        if not isinstance(tensor, ir.ExternalTensor):
            return self._by_id.get(id(tensor))
        path, start = str(tensor.path), tensor.offset or 0
        before = bisect(self._in_files, (path, start, sys.maxsize, "", "")) - 1
        if before < 0:
            return None
        file, first, size, kind, key = self._in_files[before]
        if file != path or start + tensor.nbytes > first + size:
            return None
        return key if (tensor.nbytes, _kind(tensor)) == (size, kind) else _derived(key, tensor, start - first)


def _derived(key: str | None, tensor: ir.TensorProtocol, place: Any) -> str | None:
    """The key of a part of what has this key. Long arrays of indices are told apart too."""
    if key is None:
        return None
    with np.printoptions(threshold=sys.maxsize):
        return blake3(f"{key} {_kind(tensor)} {place!r}".encode()).hexdigest()


def _held(plan: Plan, number: int, sources: _Sources) -> dict[str, tuple[str, int]]:
    """The keys and bytes of what a rank's engine holds of these tensors, whole or in part, by the weights' names."""
    graphs = plan.program(number).graphs
    if len(graphs) != 1 or find_kind(plan.engine).is_built:
        return {}
    tensors = {name: value.const_value for name, value in graphs[0].initializers.items()}
    beside = {name: each for name, each in tensors.items() if each is not None and each.nbytes > SMALL}
    if any(str(each.dtype.numpy()) not in PASSED_ON for each in beside.values()):
        return {}
    keys = ((name, sources.key(tensor), tensor.nbytes) for name, tensor in beside.items())
    return {name: (key, size) for name, key, size in keys if key is not None}


def _spared(plans: Mapping[str, Plan], held: Mapping[str, Sequence[Mapping[str, tuple[str, int]]]]) -> dict[str, int]:
    """The bytes that each device is spared."""
    there: defaultdict[str, set[str]] = defaultdict(set)
    spared: Counter[str] = Counter()
    for name, ranks in held.items():
        for rank, weights in zip(plans[name].ranks, ranks, strict=False):
            if rank.device.kind not in find_kind(plans[name].engine).shares_weights:
                continue
            device = str(rank.device)
            for key, size in weights.values():
                spared[device] += size if key in there[device] else 0
                there[device].add(key)
    return dict(spared)
