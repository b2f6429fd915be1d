"""What kernels of ONNX Runtime, mostly for CPUs, allocate while they run, in elements of the node's first output.

Measured with ONNX Runtime 1.31 (`session.collect_node_memory_stats_to_file`), with sizes for which all terms differ.
Kernels that are not listed allocate nothing, or less than 64 KiB per thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import onnx_ir as ir

from splitc.compiler.operators.gpu_kernels import has_gpu_kernel
from splitc.compiler.operators.operator import Shapes

# Scores that a thread of MultiHeadAttention keeps in blocks, about what fits into its cache.
BLOCKS = 1 << 18
# Channels in a block of convolutions with AVX-512; with AVX2 it is half as many (MlasNchwcGetBlockSize).
CHANNELS = 16
# ONNX Runtime's `accuracy_level` at which it quantizes the other factor of a product with a quantized weight to int8.
INT8_ACCURACY = 4
# Values of one step that kernels of recurrent networks keep: states before and after, results of gates.
STATES = 6
# Bytes of an address.
ADDRESS = 8


def biased(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """A Gelu's input plus its bias, if it has one."""
    return (math.prod(inputs[0]),) if len(inputs) > 1 else ()


def quantized_product(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """The other factor in int8, with a scale and a sum for each block; or an 8-bit weight, dequantized.

    See contrib_ops/cpu/quantization/matmul_nbits.cc.
    """
    asked = node.attributes
    if asked.get_int("accuracy_level", 0) == INT8_ACCURACY:
        block = asked.get_int("block_size", 32)
        return (math.prod(inputs[0]) * (block + 8) // (4 * block),)
    return (asked.get_int("K", 0) * outputs[0][-1],) if asked.get_int("bits", 4) == 8 and outputs[0] else ()


def selected(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """Two copies in a Where: of each input, broadcast with the condition (cpu/tensor/where_op.cc)."""
    condition, *both = inputs
    return tuple(math.prod(map(max, zip_longest(condition[::-1], shape[::-1], fillvalue=1))) for shape in both)


def einsum(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """Transposed copies of the inputs and the result, and the product."""
    return (2 * sum(map(math.prod, inputs)) + math.prod(outputs[0]),)


def convolution(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """Copies of image or result in blocks of channels, if there are two spatial axes.

    The image is copied before, and then the result (core/optimizer/nchwc_transformer.cc). Otherwise im2col columns, if
    there are more filters than results (MlasConvPrepare, core/mlas/lib/convolve.cpp).
    """
    image, kernel, result = inputs[0], inputs[1], outputs[0]
    if not takes_blocks(node, inputs, outputs):
        return (_columns(node, kernel, result),) if kernel[0] > math.prod(result[2:]) else ()
    before = 0 if reads_image(node, kernel) else in_blocks(image)
    return (max(before, in_blocks(result)),)


def half_convolution(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """Copies of image, kernel and result with channels last."""
    return (sum(map(math.prod, (inputs[0], inputs[1], outputs[0]))),)


def nothing(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """No scratch: on GPUs, attention and quantized products in half precision keep such values in registers."""
    return ()


def matrix_padding(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int | None:
    """The padding of a matrix's columns to whole blocks. Stacks of matrices are not packed.

    See MlasGemmPackBSize (core/mlas/lib/sgemm.cpp), and PrePack in math/matmul.cc and
    quantization/matmul_integer_base.h (core/providers/cpu).
    """
    weight = inputs[1]
    if len(weight) != 2:
        return None
    rows, columns = weight[::-1] if node.attributes.get_int("transB", 0) else weight
    return rows * (_whole(columns) - columns)


def kernel_in_blocks(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int | None:
    """The padding of a convolution's weight to whole blocks of channels; None if it is not rearranged."""
    if not takes_blocks(node, inputs, outputs):
        return None
    kernel = inputs[1]
    alone = reads_image(node, kernel) or kernel[1] == 1
    read = kernel[1] if alone else _whole(kernel[1])
    return _whole(kernel[0]) * read * math.prod(kernel[2:]) - math.prod(kernel)


def takes_blocks(node: ir.Node, inputs: Shapes, outputs: Shapes) -> bool:
    """Whether ONNX Runtime runs a single-precision convolution on blocks of channels."""
    image, kernel, result = inputs[0], inputs[1], outputs[0]
    if len(kernel) != 4 or len(image) != 4 or len(result) != 4:
        return False
    groups = node.attributes.get_int("group", 1)
    if groups == 1:
        return reads_image(node, kernel) or kernel[1] % 4 == 0
    one_by_one = kernel[1] == 1 and kernel[0] == groups and groups % 4 == 0
    return one_by_one or (kernel[1] % CHANNELS == 0 and kernel[0] // groups % CHANNELS == 0)


def reads_image(node: ir.Node, kernel: tuple[int, ...]) -> bool:
    """Whether a convolution reads an image of few channels without rearranging it into blocks."""
    return node.attributes.get_int("group", 1) == 1 and kernel[1] < CHANNELS


def in_blocks(shape: Sequence[int]) -> int:
    """The elements of an image whose channels are padded to whole blocks."""
    return shape[0] * _whole(shape[1]) * math.prod(shape[2:])


def _whole(channels: int) -> int:
    return -(-channels // CHANNELS) * CHANNELS


def integer_convolution(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """Im2col columns of one image, a byte each; the result has four (cpu/quantization/conv_integer.cc)."""
    return (-(-_columns(node, inputs[1], outputs[0]) // 4),)


def quantized_convolution(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """Pointers to each result's inputs, or im2col columns of one image and its sums, in bytes.

    Pointers if ONNX Runtime runs it with channels last, for which image or result is copied
    (cpu/quantization/qlinearconv.cc, optimizer/nhwc_transformer.cc).
    """
    image, kernel, result = inputs[0], inputs[3], outputs[0]
    source = node.inputs[0]
    if _has_integer_kernel(node, kernel) and source is not None and source.dtype == ir.DataType.UINT8:
        return image[0] * _addresses(node, kernel, result), max(math.prod(image), math.prod(result))
    return _sums_and_columns(node, kernel, result)


def between_integers(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """The scratch of a product of dequantized values whose result is quantized, in bytes: it runs in integers.

    Sums have 32 bits each (cpu/quantization/quantize_linear_matmul.cc). Images stay with channels last between such
    nodes.
    """
    if node.op_type in ("MatMul", "Gemm"):
        return (4 * math.prod(outputs[0]),)
    if node.op_type != "Conv":
        return ()
    kernel, result, maker = inputs[1], outputs[0], node.inputs[0] and node.inputs[0].producer()
    source = maker.inputs[0] if maker else None
    if _has_integer_kernel(node, kernel) and source is not None and source.dtype == ir.DataType.UINT8:
        return (_addresses(node, kernel, result),)
    return _sums_and_columns(node, kernel, result)


def _has_integer_kernel(node: ir.Node, kernel: tuple[int, ...]) -> bool:
    """Whether processors have a kernel that quantizes its results (MlasConvSymPackWSize, core/mlas/lib/convsym.cpp)."""
    groups = node.attributes.get_int("group", 1)
    return kernel[0] % CHANNELS == 0 and (_is_depthwise(node, kernel) or (groups == 1 and kernel[1] % 4 == 0))


def _is_depthwise(node: ir.Node, kernel: tuple[int, ...]) -> bool:
    return kernel[1] == 1 and kernel[0] == node.attributes.get_int("group", 1) > 1


def _addresses(node: ir.Node, kernel: tuple[int, ...], result: tuple[int, ...]) -> int:
    """The bytes of the pointers to the inputs of all of an image's results."""
    return 0 if _is_pointwise(node, kernel) else ADDRESS * math.prod(kernel[2:]) * math.prod(result[2:])


def _sums_and_columns(node: ir.Node, kernel: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...]:
    """The bytes of one image's sums, and of their pointers or im2col columns."""
    depthwise = _is_depthwise(node, kernel)
    return 4 * math.prod(result[1:]), (_addresses if depthwise else _columns)(node, kernel, result)


def _columns(node: ir.Node, kernel: tuple[int, ...], result: tuple[int, ...]) -> int:
    """The elements of one image's im2col columns, one column per result, one group at a time."""
    return 0 if _is_pointwise(node, kernel) else math.prod(kernel[1:]) * math.prod(result[2:])


def _is_pointwise(node: ir.Node, kernel: tuple[int, ...]) -> bool:
    """Whether a convolution multiplies an image without im2col: 1 x 1, without strides and padding."""
    moves = {*node.attributes.get_ints("strides", ()), 1}, {*node.attributes.get_ints("pads", ()), 0}
    return math.prod(kernel[2:]) == 1 and moves == ({1}, {0})


def transposed_convolution(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """Columns of one image: each of its positions times the kernel."""
    return (math.prod(inputs[0][2:]) * math.prod(inputs[1][1:]),)


def recurrent(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """The gates of all steps, for each direction, and the states of one step.

    The backward direction also has its data and results reversed (core/providers/cpu/rnn/uni_directional_lstm.cc,
    deep_cpu_gru.cc).
    """
    data, weight = inputs[0], inputs[1]
    if len(data) != 3 or len(weight) != 3 or not data[2]:
        return ()
    steps, hidden, directions = math.prod(data[:2]), node.attributes.get_int("hidden_size", 0), weight[0]
    gates = math.prod(weight[1:]) // data[2]
    reversed_data = 0 if node.attributes.get_string("direction", "forward") == "forward" else steps * (data[2] + hidden)
    return *[steps * gates] * directions, reversed_data, directions * STATES * data[1] * hidden


def quantized_recurrent(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """As `recurrent`, and the data in int8 (contrib_ops/cpu/quantization/dynamic_quantize_lstm.cc)."""
    return *recurrent(node, inputs, outputs), math.prod(inputs[0]) // 4


def simple_recurrent(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """The products of data and weights, of one direction at a time, and the results if they are no output.

    See core/providers/cpu/rnn/rnn.cc.
    """
    if len(inputs[0]) != 3 or len(inputs[1]) != 3:
        return ()
    products = math.prod(inputs[0][:2]) * node.attributes.get_int("hidden_size", 0)
    return products, 0 if outputs[0] else inputs[1][0] * products


def multi_head_attention(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """Queries, keys and values by heads; all scores too if they have a bias, or if keys have a past.

    Keys and values [batch, heads, rows, size] count as a past: the kernel that stores no scores does not take them.
    """
    keys = inputs[1] if len(inputs) > 1 else ()
    by_heads = len(keys) == 4
    transposed, scores = map(math.prod, inputs[: 1 if by_heads else 3]), _scores(node, inputs, outputs)
    if not by_heads and len(keys) == 3 and all(value is None for value in node.inputs[3:]):
        return *transposed, min(BLOCKS, scores)
    return *transposed, math.prod(outputs[0]), scores


def fused_attention(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """Queries, keys and values by heads, the result by heads, and all scores."""
    return 3 * math.prod(outputs[0]), math.prod(outputs[0]), _scores(node, inputs, outputs)


def attention(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """All scores, for ONNX's own Attention."""
    return (_scores(node, inputs, outputs),)


def group_query_attention(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """Queries, keys and values by heads; all scores too if the kernel that stores none lacks an option of the node.

    See use_flash in contrib_ops/cpu/bert/group_query_attention.cc.
    """
    scores, asked = _scores(node, inputs, outputs), node.attributes
    beyond = asked.get_float("softcap", 0) or asked.get_int("smooth_softmax", 0) or any(node.inputs[11:12])
    is_plain = asked.get_int("causal", 1) and not beyond and len(outputs) <= 3
    blocks = min(BLOCKS, scores) if is_plain else scores
    return *map(math.prod, inputs[:3]), blocks


def half_group_query_attention(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """No scratch if there is a CUDA kernel; else that of decomposed attention."""
    return () if has_gpu_kernel(node, node.outputs[0].dtype) else decomposed_attention(node, inputs, outputs)


def decomposed_attention(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """The scratch of attention that is decomposed on GPUs (engine_graphs/decomposed_attention.py).

    Queries, keys and values by heads; the indices of keys, as int64; the scores twice; and for prompts the filled rows
    of both caches.
    """
    query, key = math.prod(inputs[0]), math.prod(inputs[1] if len(inputs) > 1 else ())
    scores, cache = _scores(node, inputs, outputs), math.prod(outputs[1])
    return query, key, key, 2 * key, scores, scores, cache, cache


def latent_attention(node: ir.Node, inputs: Shapes, outputs: Shapes) -> tuple[int, ...]:
    """As `decomposed_attention`, for attention on latents, whose queries are by heads already."""
    added, scores = [math.prod(shape) for shape in inputs[1:3]], math.prod(outputs[0][:3]) * outputs[2][2]
    return *(2 * count for count in added), scores, scores, *map(math.prod, outputs[1:3])


def _scores(node: ir.Node, inputs: Shapes, outputs: Shapes) -> int:
    """The elements of the scores: one for each head, query and key."""
    query = inputs[0]
    if len(query) not in (3, 4) or not outputs[0]:
        return 0
    heads = (
        query[1] if len(query) == 4 else node.attributes.get_int("num_heads", node.attributes.get_int("q_num_heads", 1))
    )
    keys = max((shape[-2] for shape in (*inputs[1:3], *inputs[6:8], *outputs[1:3]) if len(shape) >= 3), default=0)
    return query[0] * heads * query[-2] * max(keys, query[-2])
