"""Brings quantized weights from the layouts of CUDA kernels to that of ONNX.

onnxruntime-genai's builder writes them so for CUDA: those of QMoE, a mixture of experts, unless
`qmoe_weights_prepacked` is 0, and those of MatMulNBits with `matmulnbits_weights_prepacked`. Shards along an axis can't
be cut from such bytes, and CPUs, on which splitc compares packages, do not know the layouts. ONNX Runtime's CUDA
provider brings experts of ONNX's layout to its own when it loads them. For MatMulNBits it has other kernels: for 1, 16
and 512 rows by weights of 4,096 x 4,096 on an H200, they took 0.7, 1.4 and 0.7 of the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.graphs.lazy_tensors import computed
from splitc.compiler.nodes import input_at, known_weight, operator_name
from splitc.runtime.arrays.array import Array

# The operators, with the attribute that tells the layout: 0 is ONNX's.
ATTRIBUTES = {"com.microsoft.QMoE": "weights_prepacked", "com.microsoft.MatMulNBits": "weight_prepacked"}
# The layouts of kernels for Ampere, and for Hopper, whose tiles are not interleaved.
AMPERE, HOPPER = 1, 2
# The inputs with a projection's weight and its scales, and the attribute that overrides its number of bits.
PROJECTIONS = ((2, 3, "fc1_expert_weight_bits"), (5, 6, "fc2_expert_weight_bits"), (8, 9, "fc3_expert_weight_bits"))
# Tiles have so many inputs, and their numbers together 16 bits an input (TensorRT-LLM, cutlass_preprocessors.cpp).
TILE, WIDE = 64, 16


@dataclass(frozen=True)
class _Packed:
    """A weight in a kernel's `layout`: matrices [outputs, inputs] of integers with this number of bits.

    `shape` is that of its bytes in ONNX's layout, in which the numbers of one output lie side by side.
    """

    weight: ir.Value
    tensor: ir.TensorProtocol
    outputs: int
    inputs: int
    bits: int
    shape: tuple[int, ...]
    layout: int

    @property
    def is_turned(self) -> bool:
        """Whether the weight has the shape that only kernels' layouts have, with the numbers of one input together."""
        return tuple(self.tensor.shape.numpy()[1:]) == (self.inputs, self.outputs * self.bits // 8)

    @property
    def has_whole_tiles(self) -> bool:
        return self.bits in (4, 8) and self.inputs % TILE == 0 and self.outputs % (WIDE // self.bits) == 0

    def unpacked(self, array: Array) -> Array:
        """The weight's bytes in ONNX's layout."""
        matrices = array.reshape(-1, self.outputs * self.inputs * self.bits // 8)
        made = [unpack(one, self.outputs, self.inputs, self.bits, self.layout) for one in matrices]
        return np.concatenate(made).reshape(self.shape)


def unpack_weights(model: ir.Model) -> bool:
    """Bring weights to ONNX's layout, in place. They are computed when they are read. Returns whether there are any.

    Weights stay as they are if something else reads them, if requests may override them, or if their layout is not
    certain: where a mixture does not tell it, only that of CUDA kernels has the numbers of one input together.
    """
    is_changed = False
    for node in [node for node in model.graph if operator_name(node) in ATTRIBUTES]:
        attribute = ATTRIBUTES[operator_name(node)]
        packed, layout = list(_packed(node)), node.attributes.get_int(attribute, -1)
        if not packed or not all(one.has_whole_tiles for one in packed):
            continue
        if layout < AMPERE and not all(one.is_turned for one in packed):
            continue
        for one in packed:
            tensor = computed(one.tensor, one.shape, one.weight.name or "", one.unpacked)
            one.weight.const_value, one.weight.shape = tensor, ir.Shape(one.shape)
        node.attributes[attribute] = ir.AttrInt64(attribute, 0)
        is_changed = True
    return is_changed


def _packed(node: ir.Node) -> Iterator[_Packed]:
    """The weights of a node that may be in a kernel's layout."""
    layout = node.attributes.get_int(ATTRIBUTES[operator_name(node)], -1)
    if node.op_type == "QMoE" and layout in (-1, AMPERE):
        yield from _projections(node)
    elif node.op_type == "MatMulNBits" and layout in (AMPERE, HOPPER):
        tensor, weight = _own(node.inputs[1]), node.inputs[1]
        outputs, inputs, bits = (node.attributes.get_int(name, 0) for name in ("N", "K", "bits"))
        if tensor is not None and weight is not None:
            yield _Packed(weight, tensor, outputs, inputs, bits, tuple(tensor.shape.numpy()), layout)


def _own(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a weight of which no one else has a use; None for other values."""
    return known_weight(value) if value is not None and len(value.uses()) == 1 else None


def _projections(node: ir.Node) -> Iterator[_Packed]:
    """The weights of a node's projections; none if one is not known to be a weight of its own in integers."""
    made = []
    if node.attributes.get_string("quant_type", "int") != "int":
        return
    for place, scales, attribute in PROJECTIONS:
        value = input_at(node, place)
        if value is None:
            continue
        tensor, rows = _own(value), _outputs(node, scales)
        bits = node.attributes.get_int(attribute, node.attributes.get_int("expert_weight_bits", 4))
        if tensor is None or rows is None or len(tensor.shape) != 3:
            return
        experts = int(tensor.shape.numpy()[0])
        row_bytes = tensor.nbytes // (experts * rows)
        shape = experts, rows, row_bytes
        made.append(_Packed(value, tensor, rows, row_bytes * 8 // bits, bits, shape, AMPERE))
    yield from made


def _outputs(node: ir.Node, place: int) -> int | None:
    """The number of a projection's outputs, by its scales [experts, outputs, ...]; None if it is not known."""
    scales = known_weight(node.inputs[place]) if place < len(node.inputs) else None
    return None if scales is None or len(scales.shape) < 2 else int(scales.shape.numpy()[1])


def unpack(packed: Array, outputs: int, inputs: int, bits: int, layout: int) -> npt.NDArray[np.uint8]:
    """A matrix in the layout of CUTLASS' mixed products before Blackwell, [outputs, inputs x bits / 8] in ONNX's.

    TensorRT-LLM's cutlass_preprocessors.cpp packs in steps: inputs in the order of the tensor cores' registers, tiles
    of outputs interleaved, numbers of 32 bits interleaved. Together they are a transposition of the axes below. Numbers
    are unsigned in both, with the lowest bits first.
    """
    blocks = WIDE // bits
    rows = (outputs // blocks, inputs // TILE, blocks) if layout == AMPERE else (outputs, inputs // TILE, 1)
    # Groups of outputs, tiles, outputs of a group, parts of a tile, pairs of inputs, inputs of a pair, and bytes with
    # an input of each block of 8.
    numbers = packed.reshape(-1).view(np.uint8).reshape(*rows, TILE // blocks // 8, 4, 2, -1)
    made: npt.NDArray[np.uint8] = np.empty((*numbers.shape[:4], blocks, bits), np.uint8)
    for pair, byte in itertools.product(range(4), range(numbers.shape[-1])):  # long loops inside of NumPy are fast
        first, second = numbers[..., pair, 0, byte], numbers[..., pair, 1, byte]
        if bits == 8:
            made[..., byte, 2 * pair], made[..., byte, 2 * pair + 1] = first, second
        else:  # a byte of the result has both inputs of a pair
            made[..., 2 * byte, pair] = first & 15 | second << 4
            made[..., 2 * byte + 1, pair] = first >> 4 | second & 240
    by_output: npt.NDArray[np.uint8] = made.transpose(0, 2, 1, 3, 4, 5)
    return by_output.reshape(outputs, inputs * bits // 8)
