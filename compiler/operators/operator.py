"""An operator's entry in the registry: everything that splitc knows about it, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from splitc.compiler.operators.operation import Operation

# Relates the axes of a node's inputs and outputs, and records the consequences for a rank with a shard.
AxesRule = Callable[[Operation], None]
Shapes = Sequence[tuple[int, ...]]
# Floating point operations of a node, from the bound shapes of its inputs and outputs.
Flops = Callable[[ir.Node, Shapes, Shapes], int]
# The blocks of memory that the kernel of a node allocates while it runs, in elements of the first output, from the same
# shapes.
Scratch = Callable[[ir.Node, Shapes, Shapes], tuple[int, ...]]
# A shape function of onnx-shape-inference, with its context and a node as arguments.
ShapeFunction = Callable[[Any, ir.Node], None]
# The numbers of an input when the node is tried on made-up data; None if any data will do.
Example = Callable[[Operation, int], Any]


@dataclass(frozen=True)
class Operator:
    """What splitc knows about an operator. Fields that refer to inputs have their indices.

    `scratch` and `padding` are functions of a rank's own shapes.
    """

    name: str  # with the domain, unless that is ONNX's own: `com.microsoft.Gelu`
    axes: AxesRule | None = None  # the rule for its axes; without one, all axes are whole
    flops: Flops | None = None  # its cost; without one, one operation for each element of its first output
    shapes: ShapeFunction | None = None  # its shape function, if onnx-shape-inference has none, or a wrong one

    # Cost and memory.
    random: bool = False  # it draws random numbers, so it must not be computed twice
    random_if: int | None = None  # the input that decides whether it draws random numbers
    dequantizes: bool = False  # it makes a weight larger; engines keep the packed weight, and dequantize it in each run
    # It quantizes computed values, or computes with quantized ones. A sum in another order may be rounded differently.
    quantizes: bool = False
    # The input with a quantized weight's scales. The int8 kernel on CPUs holds them two more times: in the packed
    # weight, and as the sums of its blocks.
    packed_scales: int | None = None
    scratch: Scratch | None = None  # what its kernel allocates while it runs; without one, nothing
    scratch_first: bool = False  # the scratch is allocated before the outputs
    reserves: bool = False  # the scratch is allocated outside the allocator's arena
    half_scratch: Scratch | None = None  # the scratch of CUDA kernels for half precision, if they have another one
    single_scratch: Scratch | None = None  # the same for single precision
    # What its kernel on CPUs adds to a weight that it packs; None if it reads the weight unpacked from its file.
    # Without one, nothing.
    padding: Callable[[ir.Node, Shapes, Shapes], int | None] | None = None
    # Its weight is rearranged into blocks of channels when a graph is optimized, before others are packed.
    takes_blocks: bool = False
    # How many nodes ONNX Runtime replaces it by on CPUs, if it has no kernel for it, or reorders channels around it.
    nodes: int = 1
    reads_part: bool = False  # it reads only as many bytes of its input as it writes
    is_view: bool = False  # its output shares the memory of its first input
    # On CPUs it writes over its first input, if nothing reads that later and the file declares one shape for both.
    overwrites: bool = False

    # Shape arithmetic.
    shape_arithmetic: bool = False  # exporters compute sizes with it, so it is folded if its inputs are known
    expands: bool = False  # its output may be longer than its inputs
    passes_sizes: bool = False  # it passes on entries of a shape vector unchanged
    reads_shape: bool = False  # it reads the shape of its input, and not its contents
    sizes_are_offsets: bool = False  # the sizes that it takes are positions along an axis: a start, an end, a length

    # Meaning, by which the roles of a model's inputs are found.
    lookups: tuple[tuple[int, int], ...] = ()  # pairs of an input of indices and the table whose rows they select
    positions: tuple[int, ...] = ()  # inputs that are positions, or indices to write at
    masks: tuple[int, ...] = ()  # inputs that are masks, attention biases, or lengths
    rearranges: bool = False  # it passes on its first input, with another shape, type or sign
    is_product: bool = False  # it multiplies its inputs (a matrix product, a convolution, attention)
    is_norm: bool = False  # it normalizes its input
    may_precede_softmax: bool = False  # it may stand between attention scores and their softmax
    may_make_angles: bool = False  # it may stand between positions and the sines of their angles
    # For outputs that are the new value of a state (a cache, a hidden state), the input that is its old value.
    states: Mapping[int, int] = field(default_factory=dict)
    # The sizes of states that the node's attributes determine, by axis.
    state_sizes: Callable[[ir.Node], Mapping[int, int]] | None = None

    # Engines.
    is_attention: bool = False  # it is attention, whose kernel ONNX Runtime chooses by shape
    gpu_passes: float = 1.0  # on GPUs it takes as long as so many reads of its inputs and writes of its outputs
    # The steps that it takes one after another, from its inputs' shapes: on GPUs each has kernels of its own.
    steps: Callable[[Shapes], int] | None = None
    gpu_bias: int | None = None  # the input that engines for GPUs add to the output in a kernel of its own
    crashes_without: int | None = None  # an optional input without which ONNX Runtime before 1.32 crashes on the CPU
    crashes_empty: tuple[int, ...] = ()  # axes of its first input: ONNX Runtime crashes on the CPU if one has size 0
    # ONNX Runtime may crash, with channels in blocks, if its first output is empty and its input is not.
    crashes_emptied: bool = False

    # Splits.
    matrix_input: int | None = None  # the input whose columns row mode may slice
    tables: tuple[int, ...] = ()  # inputs whose rows its `positions` select
    experts: tuple[int, ...] = ()  # inputs that hold the weights of a mixture's experts
    writes_in_place: bool = False  # it can write a state's new value over the old one
    example_input: Example | None = None  # contents of an input that can't have any contents: lengths, positions
    is_addition: bool = False  # it adds its inputs, so that one all-reduce serves all partial ones
    negated_inputs: frozenset[int] = frozenset()  # the inputs that it subtracts
    # For an input, the attribute that scales it, which is dropped together with it.
    scaling_attributes: Mapping[int, str] = field(default_factory=dict)
