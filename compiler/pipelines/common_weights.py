"""Weights that several modules of a folder have in common, compared by content.

Weights of equal type and shape are compared by a few bytes first, and read whole only if these agree: to read all
weights would take long.
"""

from __future__ import annotations

import sys
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from blake3 import blake3

from splitc.compiler.graphs.lazy_tensors import CutTensor
from splitc.compiler.planning.plan import Plan
from splitc.compiler.reading.external_data import SMALL
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.gpu.weight_places import PASSED_ON
from splitc.runtime.package.manifest import LISTED

K = TypeVar("K", bound=Hashable)
# The bytes at each end of a weight that are compared first: one page of memory. And the bytes that are hashed at a
# time, as in runtime/package/files.py.
GLANCE, PIECE = 1 << 12, 1 << 26


@dataclass(frozen=True)
class CommonWeights:
    """The weights that several modules have in common.

    - `keys`: by module, by rank, and by the weight's name in the rank's graph.
    - `spared`: the bytes that each device need not hold again, since another module's engine there has them.
    """

    keys: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    spared: Mapping[str, int] = field(default_factory=dict)


NONE = CommonWeights()


@dataclass(frozen=True)
class _Held:
    """A common weight, or a part of one, that a module's rank holds, and its bytes.

    `device`: the device where another module's engine may use it too; None if engines there do not share weights.
    """

    module: str
    rank: int
    device: str | None
    name: str
    key: str
    bytes: int


def find_common(plans: Mapping[str, Plan], swap: bool = False) -> CommonWeights:
    """The weights of 64 KiB and more that several of these modules have in common, whatever their names and files.

    Ranks with several engines hold their weights inside these, and so do engines with a weight that sessions can't
    share. With `swap`, only one module's weights are in memory at a time, so none are common.
    """
    tensors = {name: _large_tensors(plan) for name, plan in plans.items()}
    equal = {} if swap else _find_equal(tensors)
    if not equal:
        return NONE
    held = [weight for name, plan in plans.items() for weight in _find_held(name, plan, _Keys(tensors[name], equal))]
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for weight in held:
        owners[weight.key].add(weight.module)
    # As in the manifest, ranks are those of the first replica: all others load its files.
    keys: dict[str, list[dict[str, str]]] = {name: [{} for _ in plan.written.ranks] for name, plan in plans.items()}
    for weight in held:
        if len(owners[weight.key]) > 1 and weight.rank < len(keys[weight.module]):
            keys[weight.module][weight.rank][weight.name] = weight.key
    return CommonWeights(keys, _spared(held))


def _large_tensors(plan: Plan) -> list[ir.TensorProtocol]:
    """The model's weights that are large enough to be shared."""
    values = plan.analysis.graph.graph.initializers.values()
    tensors = (value.const_value for value in values if value.const_value is not None)
    return [tensor for tensor in tensors if tensor.dtype != ir.DataType.STRING and tensor.nbytes >= LISTED]


def _find_equal(tensors: Mapping[str, Sequence[ir.TensorProtocol]]) -> dict[int, str]:
    """The hashes of the tensors that several modules have, by the tensors' ids."""
    alike = _in_several(tensors, _glance)
    return _in_several(
        {name: [tensor for tensor in own if id(tensor) in alike] for name, own in tensors.items()}, _hash
    )


def _in_several(
    tensors: Mapping[str, Iterable[ir.TensorProtocol]], key_of: Callable[[ir.TensorProtocol], K]
) -> dict[int, K]:
    """The keys that several modules have, by their tensors' ids."""
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
    """The tensor's bytes. A file is mapped, and not kept in memory."""
    if isinstance(tensor, ir.ExternalTensor):
        return np.memmap(Path(tensor.path), np.uint8, "r", tensor.offset or 0, (tensor.nbytes,))
    return np.frombuffer(tensor.tobytes(), np.uint8)


class _Keys:
    """The keys of a model's tensors that other modules have too, and of parts that are cut from them for ranks."""

    def __init__(self, tensors: Sequence[ir.TensorProtocol], keys: Mapping[int, str]) -> None:
        self._keys = {id(tensor): keys[id(tensor)] for tensor in tensors if id(tensor) in keys}
        self._in_files = sorted(
            (str(tensor.path), tensor.offset or 0, tensor.nbytes, _kind(tensor), self._keys[id(tensor)])
            for tensor in tensors
            if isinstance(tensor, ir.ExternalTensor) and id(tensor) in self._keys
        )

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, tensor: ir.TensorProtocol) -> str | None:
        """The key of one of these tensors, or of a part of one; None for other tensors."""
        if isinstance(tensor, CutTensor):
            return _derived(self.find(tensor.source), tensor, sorted(tensor.places.items()))
        if not isinstance(tensor, ir.ExternalTensor):
            return self._keys.get(id(tensor))
        path, start = str(tensor.path), tensor.offset or 0
        before = bisect(self._in_files, (path, start, sys.maxsize, "", "")) - 1
        if before < 0:
            return None
        file, first, size, kind, key = self._in_files[before]
        if file != path or start + tensor.nbytes > first + size:
            return None
        return key if (tensor.nbytes, _kind(tensor)) == (size, kind) else _derived(key, tensor, start - first)


def _derived(key: str | None, tensor: ir.TensorProtocol, place: Any) -> str | None:
    """The key of a part of the tensor with this key. Long arrays of indices are distinguished too."""
    if key is None:
        return None
    with np.printoptions(threshold=sys.maxsize):
        return blake3(f"{key} {_kind(tensor)} {place!r}".encode()).hexdigest()


def _find_held(module: str, plan: Plan, keys: _Keys) -> Iterator[_Held]:
    """The tensors with keys, whole or in part, that the engines of a module's ranks hold."""
    kind = find_kind(plan.engine)
    if kind.is_built or not keys:
        return
    for number, rank in enumerate(plan.ranks):
        graphs = plan.program(number).graphs
        weights = graphs[0].initializers.items() if len(graphs) == 1 else ()
        beside = {name: value.const_value for name, value in weights if value.const_value is not None}
        beside = {name: tensor for name, tensor in beside.items() if tensor.nbytes > SMALL}
        if not PASSED_ON.issuperset(str(tensor.dtype.numpy()) for tensor in beside.values()):
            continue
        device = str(rank.device) if rank.device.kind in kind.shares_weights else None
        for name, tensor in beside.items():
            if (key := keys.find(tensor)) is not None:
                yield _Held(module, number, device, name, key, tensor.nbytes)


def _spared(held: Iterable[_Held]) -> dict[str, int]:
    """The bytes that each device is spared, since an earlier module has them there."""
    there: set[tuple[str, str]] = set()
    spared: Counter[str] = Counter()
    for weight in held:
        if weight.device is not None:
            spared[weight.device] += weight.bytes if (weight.device, weight.key) in there else 0
            there.add((weight.device, weight.key))
    return dict(spared)
