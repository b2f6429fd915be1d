"""The effect of rounding alone on the unsplit model's outputs: a split model may differ about as much."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from splitc.runtime.tools.compare import Difference

Arrays = Mapping[str, npt.NDArray[Any]]
# How much farther off than rounding moved the unsplit model's outputs, in a few tries, the split model's may be.
# A choice: the few tries do not find the most that rounding can do. Twice is still far below what a wrong rule does.
ROUNDING = 2
# Up, down, and random directions. A choice: each runs the unsplit model once more, where outputs differ.
TRIES = 4
# How many steps numbers of at least 32 bits move in random directions. A choice: sums in another order differ by some
# last digits, and a U-Net quantized to 8 bits changed by 0.8 % with one step, by 3 % with 4 to 64, as split.
STEPS = 4
# The number types that have nextafter.
NUDGED = tuple(np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
# How many numbers a weight has that is nudged. A choice: in shorter ones are exponents, and scales from which sizes
# follow; norms, biases and scales of channels, of which any model has some, are not longer.
FEWEST, MOST = 8, 1 << 16
# The operators whose results are sums of many products: where numbers grow beyond the largest of float16 first.
PRODUCTS = ("Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul")


def own_moves(own: Sequence[Sequence[Difference]]) -> dict[str, float]:
    """The largest relative change of each output in some runs of the unsplit model."""
    known: dict[str, float] = {}
    for difference in (difference for run in own for difference in run if difference.problem is None):
        known[difference.name] = max(difference.relative, known.get(difference.name, 0.0))
    return known


def excuse(differences: Sequence[Difference], own: Sequence[Sequence[Difference]]) -> list[Difference]:
    """The differences, passed where the unsplit model's own outputs (`own`) change about as much."""
    known = own_moves(own)
    return [replace(d, passed=d.passed or d.relative <= ROUNDING * known.get(d.name, 0.0)) for d in differences]


def nudged(feeds: Arrays) -> Iterator[Arrays]:
    """The feeds with all floating-point numbers a few steps away, in some directions; nothing if there are none."""
    if any(array.dtype in NUDGED for array in feeds.values()):
        for number in range(TRIES):
            yield {name: _step(array, number) if array.dtype in NUDGED else array for name, array in feeds.items()}


def _step(array: npt.NDArray[Any], number: int) -> npt.NDArray[Any]:
    """The numbers one step up, one step down, or for a higher `number` of the try some in random directions.

    A scale that a model computes from all of its numbers follows them if all go up.
    """
    ends = (np.inf, -np.inf)
    is_random = number >= len(ends)
    end = np.random.default_rng(number).choice(ends, array.shape) if is_random else ends[number]
    for _ in range(STEPS if is_random and array.dtype.itemsize >= 4 else 1):
        array = np.nextafter(array, np.asarray(end, array.dtype))
    return array


def nudged_weights(model: Path) -> Iterator[bytes]:
    """The model with numbers in its weight vectors a few steps away, in some directions; nothing without `onnx`.

    External data stay in their files, except for these vectors.
    """
    if find_spec("onnx") is None:
        return
    import onnx
    from onnx import external_data_helper, numpy_helper

    proto = onnx.load(model, load_external_data=False)
    weights = {
        number: tensor
        for number, tensor in enumerate(proto.graph.initializer)
        if FEWEST <= np.prod(tensor.dims) <= MOST and onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type) in NUDGED
    }
    for tensor in weights.values():
        if external_data_helper.uses_external_data(tensor):
            place = external_data_helper.ExternalDataInfo(tensor)
            size = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            with (model.parent / place.location).open("rb") as file:  # onnx's own function refuses links
                file.seek(place.offset or 0)
                tensor.raw_data = file.read(int(np.prod(tensor.dims)) * size)
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    arrays = {number: numpy_helper.to_array(tensor) for number, tensor in weights.items()}
    for attempt in range(TRIES) if arrays else ():
        for number, array in arrays.items():
            # The largest numbers stay: they stand for infinity.
            most = ml_dtypes.finfo(array.dtype).max / 2  # type: ignore[no-untyped-call]
            moved = np.where(np.abs(array) < most, _step(array, attempt), array)
            proto.graph.initializer[number].CopyFrom(numpy_helper.from_array(moved, weights[number].name))
        yield proto.SerializeToString()


def with_results(model: Path, operators: Collection[str]) -> tuple[list[str], bytes] | None:
    """The model with the results of these operators, or of all, as further outputs, and their names.

    None without `onnx`.
    """
    if find_spec("onnx") is None:
        return None
    import onnx

    proto = onnx.load(model, load_external_data=False)
    outputs = {value.name for value in proto.graph.output}
    nodes = [node for node in proto.graph.node if not operators or node.op_type in operators]
    names = [name for node in nodes for name in node.output if name]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in outputs)
    return names, proto.SerializeToString()
