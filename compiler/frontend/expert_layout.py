"""Brings weights of QMoE, mixtures of quantized experts, from the layout of a CUDA kernel to that of ONNX.

onnxruntime-genai's builder writes them so for CUDA, unless `qmoe_weights_prepacked` is 0. Shards along an axis can't be
cut from such bytes, and CPUs, on which splitc compares packages, do not know the layout. ONNX Runtime's CUDA provider
brings weights of ONNX's layout to its own when it loads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.frontend.lazy_tensors import computed
from splitc.compiler.nodes import known_weight, operator_name
from splitc.runtime.arrays.array import Array

OPERATOR, ATTRIBUTE = "com.microsoft.QMoE", "weights_prepacked"
# The inputs with a projection's weight and its scales, and the attribute that overrides its number of bits.
PROJECTIONS = ((2, 3, "fc1_expert_weight_bits"), (5, 6, "fc2_expert_weight_bits"), (8, 9, "fc3_expert_weight_bits"))
# The kernel's layout is made of tiles of so many rows of 16 bits (TensorRT-LLM, cutlass_preprocessors.cpp).
TILE, WIDE = 64, 16


@dataclass(frozen=True)
class _Packed:
    """A weight in a kernel's layout: matrices [outputs, inputs] of integers with this number of bits."""

    weight: ir.Value
    tensor: ir.TensorProtocol
    experts: int
    outputs: int
    inputs: int
    bits: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the weight's bytes in ONNX's layout: numbers of one output lie side by side."""
        return self.experts, self.outputs, self.inputs * self.bits // 8

    @property
    def is_turned(self) -> bool:
        """Whether the weight has the shape that only a kernel's layout has: outputs lie side by side."""
        return tuple(self.tensor.shape.numpy()) == (self.experts, self.inputs, self.outputs * self.bits // 8)

    @property
    def has_whole_tiles(self) -> bool:
        return self.bits in (4, 8) and self.inputs % TILE == 0 and self.outputs % (WIDE // self.bits) == 0

    def unpacked(self, array: Array) -> Array:
        """The weight's bytes in ONNX's layout."""
        matrices = (unpack(one, self.outputs, self.inputs, self.bits) for one in array.reshape(self.experts, -1))
        return np.stack(list(matrices))


def unpack_experts(model: ir.Model) -> bool:
    """Bring experts' weights to ONNX's layout, in place. They are computed when they are read. Whether there are any.

    Weights stay as they are if something else reads them, if requests may override them, or if their layout is not
    certain: without the attribute, only that of CUDA kernels has outputs side by side.
    """
    is_changed = False
    for node in [node for node in model.graph if operator_name(node) == OPERATOR]:
        packed, is_said = list(_projections(node)), node.attributes.get_int(ATTRIBUTE, -1)
        if is_said == 0 or not packed or not all(one.has_whole_tiles for one in packed):
            continue
        if is_said != 1 and not all(one.is_turned for one in packed):
            continue
        for one in packed:
            tensor = computed(one.tensor, one.shape, one.weight.name or "", one.unpacked)
            one.weight.const_value, one.weight.shape = tensor, ir.Shape(one.shape)
        node.attributes[ATTRIBUTE] = ir.AttrInt64(ATTRIBUTE, 0)
        is_changed = True
    return is_changed


def _projections(node: ir.Node) -> Iterator[_Packed]:
    """The weights of a node's projections; none if one is not known to be a weight of its own in integers."""
    made = []
    outputs = [_outputs(node, scales) for _, scales, _ in PROJECTIONS]
    if node.attributes.get_string("quant_type", "int") != "int" or None in outputs[:2]:
        return
    hidden = outputs[1]
    for number, (place, _, attribute) in enumerate(PROJECTIONS):
        value = node.inputs[place] if place < len(node.inputs) else None
        if value is None:
            continue
        tensor, rows = known_weight(value), outputs[number]
        bits = node.attributes.get_int(attribute, node.attributes.get_int("expert_weight_bits", 4))
        if tensor is None or rows is None or hidden is None or len(value.uses()) > 1 or len(tensor.shape) != 3:
            return
        experts = int(tensor.shape.numpy()[0])
        inputs = tensor.nbytes * 8 // (bits * experts * rows)
        made.append(_Packed(value, tensor, experts, rows, inputs, bits))
    yield from made


def _outputs(node: ir.Node, place: int) -> int | None:
    """The number of a projection's outputs, by its scales [experts, outputs, ...]; None if it is not known."""
    scales = known_weight(node.inputs[place]) if place < len(node.inputs) else None
    return None if scales is None or len(scales.shape) < 2 else int(scales.shape.numpy()[1])


def unpack(packed: Array, outputs: int, inputs: int, bits: int) -> npt.NDArray[np.uint8]:
    """A matrix in the layout of CUTLASS' mixed products before Blackwell, [outputs, inputs x bits / 8] in ONNX's.

    The steps of TensorRT-LLM's cutlass_preprocessors.cpp, last one first: numbers of 32 bits are interleaved, rows are
    interleaved by tiles, and inputs are in the order of the tensor cores' registers. Numbers are unsigned in both.
    """
    numbers = _numbers(packed.reshape(-1).view(np.uint8), bits).reshape(-1, 32 // bits)
    numbers = numbers[:, np.argsort([*range(0, 32 // bits, 2), *range(1, 32 // bits, 2)])]
    together = WIDE // bits
    tiles = numbers.reshape(outputs // together, inputs // TILE, together, TILE)
    matrix = tiles.transpose(0, 2, 1, 3).reshape(outputs, -1, len(_registers(bits)))
    return _bytes(matrix[:, :, np.argsort(_registers(bits))].reshape(outputs, inputs), bits)


def _registers(bits: int) -> Sequence[int]:
    """The order of inputs: pairs that a thread of a tensor core takes together."""
    return [8 * block + 2 * pair + one for pair in range(4) for block in range(WIDE // bits) for one in range(2)]


def _numbers(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """The numbers in bytes, the lowest bits first."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)


def _bytes(numbers: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    return numbers if bits == 8 else numbers[:, ::2] | (numbers[:, 1::2] << np.uint8(4))
