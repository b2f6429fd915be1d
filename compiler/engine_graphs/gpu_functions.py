"""Functions that stand for operators on GPUs, so that engines for GPUs run on CPU devices too.

They are written for those that ONNX Runtime has on GPUs only (runtime/engines/onnx_session.py): what these compute in
half precision (ContribOperators.md of ONNX Runtime). For the fused operators of `fused_rows` they are made of the same
steps by ONNX operators, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import onnx
import onnx.parser
import onnx_ir as ir
from onnx.helper import make_function, make_node, make_opsetid

from splitc.compiler.graphs.editor import Editor
from splitc.compiler.nodes import MICROSOFT
from splitc.runtime.arrays.onnx_types import KNOWN
from splitc.runtime.engines.onnx_session import FUNCTIONS
from splitc.runtime.package.fused import Fused, FusedInput, FusedStep

DOMAIN, PROGRAM = "splitc.fused", "program"
SINGLE = onnx.TensorProto.FLOAT
# The first opset whose reductions take axes as an input.
AXES_AS_INPUTS = 18


def kernel_of(node: onnx.NodeProto) -> Fused:
    """The kernel that a fused operator's attribute PROGRAM describes."""
    program = next(attribute.s for attribute in node.attribute if attribute.name == PROGRAM)
    return msgspec.json.decode(program, type=Fused)


def function_of(kernel: Fused, opset: int) -> onnx.FunctionProto:
    """The function of a fused operator, for this opset of ONNX's operators, 13 or newer."""
    body = _Body(kernel, opset)
    for step in kernel.steps:
        body.values.append(body.write(step))
    body.add("Cast", body.values[-1], to=KNOWN[kernel.dtype], result="halves")
    body.add("Reshape", "halves", "shape", result="output")
    names = [f"input_{number}" for number in range(len(kernel.inputs))]
    opsets = [make_opsetid("", opset), make_opsetid(MICROSOFT, 1)]
    return make_function(DOMAIN, kernel.name, names, ["output"], body.nodes, opsets, [PROGRAM])


class _Body:
    """A function's nodes. `values` are its inputs and then its steps' results, [rows, columns] in float32."""

    def __init__(self, kernel: Fused, opset: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._columns, self._opset = kernel.columns, opset
        self.add("Shape", "input_0", result="shape")
        self._count = self._rows_of(self.add("Reshape", "input_0", self._sizes(-1, kernel.columns)))
        self.values = [self._input(f"input_{number}", given) for number, given in enumerate(kernel.inputs)]

    def add(self, operator: str, *inputs: str, domain: str = "", result: str = "", **attributes: Any) -> str:
        """Add a node. Returns its result."""
        result = result or f"value_{len(self.nodes)}"
        self.nodes.append(make_node(operator, inputs, [result], domain=domain, **attributes))
        return result

    def _sizes(self, *sizes: int) -> str:
        return self.add("Constant", value_ints=sizes)

    def _number(self, number: float) -> str:
        return self.add("Constant", value_float=number)

    def _rows_of(self, value: str) -> str:
        """The number of a matrix's rows, int64 [1]."""
        return self.add("Slice", self.add("Shape", value), self._sizes(0), self._sizes(1))

    def _input(self, name: str, given: FusedInput) -> str:
        """An input with its rows repeated as its span says; positions are returned as they are."""
        if given.span == "positions":
            return name
        rows = self.add("Cast", self.add("Reshape", name, self._sizes(-1, given.width)), to=SINGLE)
        if given.span in ("all", "table"):
            return rows
        times = self.add("Div", self._count, self._rows_of(rows))
        if given.span == "trailing":
            return self.add("Tile", rows, self.add("Concat", times, self._sizes(1), axis=0))
        wide = self.add("Tile", rows, self.add("Concat", self._sizes(1), times, axis=0))
        return self.add("Reshape", wide, self._sizes(-1, given.width))

    def write(self, step: FusedStep) -> str:
        """Add a step's nodes. Returns its result."""
        reads, numbers = [self.values[place] for place in step.reads], step.numbers
        match step.operator:
            case "RotaryEmbedding":
                return self._rotary(reads, step)
            case "LayerNormalization" | "RMSNormalization":
                return self._norm(reads, numbers["epsilon"], centered=step.operator == "LayerNormalization")
            case "Clip":
                return self.add("Min", self.add("Max", *reads[:2]), reads[2])
            case "Gelu":
                return self._gate(reads[0], self.add("Erf", self.add("Mul", reads[0], self._number(math.sqrt(0.5)))))
            case "GeluTanh":
                return self._gate(reads[0], self.add("Tanh", self._inside_of_gelu(reads[0])))
            case "QuickGelu":
                scaled = self.add("Mul", reads[0], self._number(numbers["alpha"]))
                return self.add("Mul", reads[0], self.add("Sigmoid", scaled))
        return self.add(step.operator, *reads)

    def _gate(self, value: str, sign: str) -> str:
        """x (1 + sign) / 2."""
        whole = self.add("Mul", value, self.add("Add", sign, self._number(1.0)))
        return self.add("Mul", whole, self._number(0.5))

    def _inside_of_gelu(self, value: str) -> str:
        """sqrt(2 / pi) (x + 0.044715 x^3), whose tangent approximates Gelu."""
        square = self.add("Mul", self.add("Mul", value, value), self._number(0.044715))
        factor = self.add("Add", square, self._number(1.0))
        return self.add("Mul", self.add("Mul", value, factor), self._number(math.sqrt(2 / math.pi)))

    def _norm(self, reads: Sequence[str], epsilon: float, centered: bool) -> str:
        value, scale, *shift = reads
        if centered:
            value = self.add("Sub", value, self._mean(value))
        variance = self.add("Add", self._mean(self.add("Mul", value, value)), self._number(epsilon))
        result = self.add("Mul", self.add("Div", value, self.add("Sqrt", variance)), scale)
        return self.add("Add", result, shift[0]) if shift else result

    def _mean(self, value: str) -> str:
        if self._opset >= AXES_AS_INPUTS:
            return self.add("ReduceMean", value, self._sizes(-1))
        return self.add("ReduceMean", value, axes=[-1])

    def _rotary(self, reads: Sequence[str], step: FusedStep) -> str:
        """Rotary embedding of [batch, length, heads x columns]."""
        heads, interleaved = int(step.numbers["heads"]), int(step.numbers["interleaved"])
        outer = self.add("Slice", "shape", self._sizes(0), self._sizes(2))
        data = self.add("Reshape", reads[0], self.add("Concat", outer, self._sizes(heads * self._columns), axis=0))
        given = data, *reads[1:]
        rotated = self.add("RotaryEmbedding", *given, domain=MICROSOFT, num_heads=heads, interleaved=interleaved)
        return self.add("Reshape", rotated, self._sizes(-1, self._columns))


# The first half of the columns, times Gelu of the second.
BIAS_SPLIT_GELU = """
BiasSplitGelu (X, bias) => (Y) {
    biased = Add (X, bias)
    single = Cast <to = 1> (biased)
    shape = Constant <value_ints = [0, 0, 2, -1]> ()
    halves = Reshape (single, shape)
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    left = Gather <axis = 2> (halves, zero)
    right = Gather <axis = 2> (halves, one)
    root = Constant <value_float = 1.4142135> ()
    scaled = Div (right, root)
    erf = Erf (scaled)
    unit = Constant <value_float = 1.0> ()
    more = Add (erf, unit)
    half = Constant <value_float = 0.5> ()
    halved = Mul (right, half)
    gate = Mul (halved, more)
    product = Mul (left, gate)
    Y = Cast <to = 10> (product)
}
"""
# Of [n, h, w, c], with an activation x sigmoid(x) if that attribute is 1.
GROUP_NORM = """
GroupNorm <activation, epsilon, groups> (X, gamma, beta) => (Y) {
    single = Cast <to = 1> (X)
    first = Transpose <perm = [0, 3, 1, 2]> (single)
    shape = Shape (first)
    same = Constant <value_ints = [0]> ()
    rest = Constant <value_ints = [-1]> ()
    number = Constant <value_int : int = @groups> ()
    groups = Reshape (number, rest)
    grouped_shape = Concat <axis = 0> (same, groups, rest)
    grouped = Reshape (first, grouped_shape)
    ones = ConstantOfShape <value = float[1] {1.0}> (groups)
    zeros = ConstantOfShape <value = float[1] {0.0}> (groups)
    normal = InstanceNormalization <epsilon : float = @epsilon> (grouped, ones, zeros)
    whole = Reshape (normal, shape)
    last = Transpose <perm = [0, 2, 3, 1]> (whole)
    scaled = Mul (last, gamma)
    shifted = Add (scaled, beta)
    activates = Constant <value_int : int = @activation> ()
    weight = Cast <to = 1> (activates)
    gate = Sigmoid (shifted)
    unit = Constant <value_float = 1.0> ()
    less = Sub (gate, unit)
    part = Mul (less, weight)
    factor = Add (part, unit)
    product = Mul (shifted, factor)
    Y = Cast <to = 10> (product)
}
"""
# Of [n, h, w, c], with weights [m, h, w, c].
NHWC_CONV = """
NhwcConv <dilations, group, kernel_shape, pads, strides> (X, W) => (Y) {
    first = Transpose <perm = [0, 3, 1, 2]> (X)
    weight = Transpose <perm = [0, 3, 1, 2]> (W)
    result = Conv <dilations : ints = @dilations, group : int = @group, kernel_shape : ints = @kernel_shape,
                   pads : ints = @pads, strides : ints = @strides> (first, weight)
    Y = Transpose <perm = [0, 2, 3, 1]> (result)
}
"""
BODIES = {"BiasSplitGelu": BIAS_SPLIT_GELU, "GroupNorm": GROUP_NORM, "NhwcConv": NHWC_CONV}
# The opset from which on all of their operators exist as they are used here.
OPSET = 13


def call(editor: Editor, before: ir.Node, name: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
    """Insert a call of one of the functions right before a node. Returns its result."""
    editor.graph.opset_imports.setdefault(FUNCTIONS, 1)
    return editor.before(before, name, *inputs, domain=FUNCTIONS, **attributes)


def functions_of(graph: ir.Graph) -> list[ir.Function]:
    """The functions that a graph's nodes call."""
    nodes = [ir.to_proto(node) for node in graph if node.domain in (FUNCTIONS, DOMAIN)]
    return [ir.from_proto(proto) for proto in written_functions(nodes, graph.opset_imports.get("", OPSET))]


def written_functions(nodes: Iterable[onnx.NodeProto], opset: int) -> list[onnx.FunctionProto]:
    """The functions that some nodes call, for this opset."""
    head = f'<domain: "{FUNCTIONS}", opset_import: ["" : {opset}]>'
    made: dict[str, onnx.FunctionProto] = {}
    for node in nodes:
        if node.domain == FUNCTIONS and node.op_type not in made:
            made[node.op_type] = onnx.parser.parse_function(head + BODIES[node.op_type])
        elif node.domain == DOMAIN and node.op_type not in made:
            made[node.op_type] = function_of(kernel_of(node), opset)
    return list(made.values())
