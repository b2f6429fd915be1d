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
    """What splitc knows about an operator. `name` includes the domain, unless it is ONNX's own: `com.microsoft.Gelu`.

    Fields that refer to inputs have their indices.

    - `axes`: the rule for its axes. Without one, all axes are whole.
    - `flops`: its cost. Without one, one operation for each element of its first output.
    - `shapes`: its shape function, if onnx-shape-inference has none, or a wrong one.

    Cost and memory:

    - `random`: it draws random numbers, so it must not be computed twice.
    - `random_if`: the input that decides whether it draws random numbers.
    - `dequantizes`: it makes a weight larger. Engines keep the packed weight and dequantize it in each run.
    - `quantizes`: it quantizes computed values, or computes with quantized ones. A sum in another order may then be
      rounded differently.
    - `packed_scales`: the input with a quantized weight's scales. The int8 kernel on CPUs holds them two more times: in
      the packed weight, and as the sums of its blocks.
    - `scratch`: what its kernel allocates while it runs. Without one, nothing.
    - `scratch_first`: the scratch is allocated before the outputs.
    - `reserves`: the scratch is allocated outside the allocator's arena.
    - `half_scratch`, `single_scratch`: the scratch of the CUDA kernels for half and single precision, if they have
      another one.
    - `padding`: what its kernel on CPUs adds to a weight that it packs; None if it reads the weight unpacked from its
      file. Without one, nothing. Scratches and `padding` are functions of a rank's own shapes.
    - `takes_blocks`: its weight is rearranged into blocks of channels when a graph is optimized, before others are
      packed.
    - `nodes`: the number of nodes that ONNX Runtime replaces it by on CPUs, if it has no kernel for it, or reorders
      channels around it.
    - `reads_part`: it reads only as many bytes of its input as it writes.
    - `is_view`: its output shares the memory of its first input.
    - `overwrites`: its kernel on CPUs writes over its first input, if nothing reads that later and the file declares
      the same shape for both.

    Shape arithmetic:

    - `shape_arithmetic`: exporters compute sizes with it, so it is folded if its inputs are known.
    - `expands`: its output may be longer than its inputs.
    - `passes_sizes`: it passes on entries of a shape vector unchanged.
    - `reads_shape`: it reads the shape of its input, and not its contents.
    - `sizes_are_offsets`: the sizes that it takes are positions along an axis: a start, an end, a length.

    Meaning, by which the roles of a model's inputs are found:

    - `lookups`: pairs of an input of indices and the table whose rows they select.
    - `positions`: inputs that are positions, or indices to write at.
    - `masks`: inputs that are masks, attention biases, or lengths.
    - `rearranges`: it passes on its first input, with another shape, type or sign.
    - `is_product`: it multiplies its inputs (a matrix product, a convolution, attention).
    - `is_norm`: it normalizes its input.
    - `may_precede_softmax`: it may stand between attention scores and their softmax.
    - `may_make_angles`: it may stand between positions and the sines of their angles.
    - `states`: for outputs that are the new value of a state (a cache, a hidden state), the input that is its old
      value.
    - `state_sizes`: the sizes of states that the node's attributes determine, by axis.

    Engines:

    - `is_attention`: it is attention, whose kernel ONNX Runtime chooses by shape.
    - `gpu_passes`: on GPUs it takes as long as this number of reads of its inputs and writes of its outputs.
    - `gpu_bias`: the input that engines for GPUs add to the output in a kernel of its own.
    - `crashes_without`: an optional input without which ONNX Runtime before 1.32 crashes on the CPU.
    - `crashes_empty`: axes of its first input. ONNX Runtime crashes on the CPU if one of them has size 0.
    - `crashes_emptied`: ONNX Runtime may crash, with channels in blocks, if its first output is empty and its input is
      not.

    Splits:

    - `matrix_input`: the input whose columns row mode may slice.
    - `tables`: inputs whose rows its `positions` select.
    - `experts`: inputs that hold the weights of a mixture's experts.
    - `writes_in_place`: it can write a state's new value over the old one.
    - `example_input`: example contents of an input that can't have any contents: lengths, positions.
    - `is_addition`: it adds its inputs, so that one all-reduce serves all partial ones.
    - `negated_inputs`: the inputs that it subtracts.
    - `scaling_attributes`: for an input, the attribute that scales it, which is dropped together with it.
    """

    name: str
    axes: AxesRule | None = None
    flops: Flops | None = None
    shapes: ShapeFunction | None = None
    random: bool = False
    random_if: int | None = None
    dequantizes: bool = False
    quantizes: bool = False
    packed_scales: int | None = None
    scratch: Scratch | None = None
    scratch_first: bool = False
    reserves: bool = False
    half_scratch: Scratch | None = None
    single_scratch: Scratch | None = None
    padding: Callable[[ir.Node, Shapes, Shapes], int | None] | None = None
    takes_blocks: bool = False
    nodes: int = 1
    reads_part: bool = False
    is_view: bool = False
    overwrites: bool = False
    shape_arithmetic: bool = False
    expands: bool = False
    passes_sizes: bool = False
    reads_shape: bool = False
    sizes_are_offsets: bool = False
    lookups: tuple[tuple[int, int], ...] = ()
    positions: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()
    rearranges: bool = False
    is_product: bool = False
    is_norm: bool = False
    may_precede_softmax: bool = False
    may_make_angles: bool = False
    states: Mapping[int, int] = field(default_factory=dict)
    state_sizes: Callable[[ir.Node], Mapping[int, int]] | None = None
    is_attention: bool = False
    gpu_passes: float = 1.0
    gpu_bias: int | None = None
    crashes_without: int | None = None
    crashes_empty: tuple[int, ...] = ()
    crashes_emptied: bool = False
    matrix_input: int | None = None
    tables: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    writes_in_place: bool = False
    example_input: Example | None = None
    is_addition: bool = False
    negated_inputs: frozenset[int] = frozenset()
    scaling_attributes: Mapping[int, str] = field(default_factory=dict)
