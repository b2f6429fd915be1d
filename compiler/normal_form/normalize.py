"""Brings a model into the normal form that all later passes expect. `normal_form.graph.Graph` defines it."""

from __future__ import annotations

from itertools import chain

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from splitc.compiler.errors import ModelError
from splitc.compiler.graphs.editor import WHERE
from splitc.compiler.graphs.matching import is_onnx
from splitc.compiler.graphs.reads import all_nodes, has_subgraphs, node_reads, subgraphs
from splitc.compiler.graphs.uniform import copy_selections
from splitc.compiler.graphs.unused import remove_unused
from splitc.compiler.inference.symbolic import UNKNOWN, add_types
from splitc.compiler.nodes import unused_name
from splitc.compiler.normal_form.activations import take_out_activations
from splitc.compiler.normal_form.appended import stack_in_loops
from splitc.compiler.normal_form.constants import bypass_same, fold_constants, merge_casts
from splitc.compiler.normal_form.counted import count_by_range
from splitc.compiler.normal_form.directions import join_directions
from splitc.compiler.normal_form.einsums import multiply_by_matrices
from splitc.compiler.normal_form.loop_lookups import look_up_before_loops
from splitc.compiler.normal_form.loops import unroll_loops
from splitc.compiler.normal_form.repeats import reshape_repeats
from splitc.compiler.normal_form.runnable import make_runnable
from splitc.compiler.normal_form.sequence_maps import unroll_maps
from splitc.compiler.normal_form.sequences import replace_sequences, unwrap_optionals
from splitc.compiler.normal_form.stacked_weights import split_stacks
from splitc.compiler.reading.loading import known_operators

# Operators that opsets 8 and 9 only gave more types, inputs or outputs; and BatchNormalization lost `spatial`.
_WIDENED = frozenset(
    (
        *("BatchNormalization", "Cast", "Constant", "Flatten", "Gemm", "Greater", "Less"),
        *("MatMul", "Max", "MaxPool", "Mean", "Min", "PRelu", "Sum"),
    )
)


def lift(model: ir.Model) -> None:
    """Inline functions, and turn all constants into initializers of the main graph, in place.

    Each pass walks the whole model, and most models need none, so it is checked first.
    """
    for identifier, function in tuple(model.functions.items()):
        if (function.domain, function.name) in known_operators():  # ONNX Runtime prefers its own operator
            del model.functions[identifier]
    if model.functions:
        passes.InlinePass()(model)
    SortUnsorted()(model)
    if any(node.op_type == "Constant" for node in all_nodes(model.graph)):
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if has_subgraphs(model.graph):
        passes.LiftSubgraphInitializersToMainGraphPass()(model)
        name_apart(model)  # a lifted value may have the name of a value in another branch
    look_up_before_loops(model.graph)
    unroll_loops(model)
    unroll_maps(model)
    stack_in_loops(model)
    replace_cast_like(model)
    unwrap_optionals(model)
    fold_constants(model.graph)
    split_stacks(model.graph)
    join_directions(model.graph)
    multiply_by_matrices(model.graph)
    # torch's older exporter writes casts to the type that a value has, and no types of values.
    if any(cast.inputs[0].dtype in UNKNOWN for cast in model.graph if is_onnx(cast, "Cast") and cast.inputs[0]):
        add_types(model)
    import_where(model)
    add_in_pairs(model)
    bypass_same(model.graph)
    merge_casts(model.graph)
    replace_sequences(model)
    reshape_repeats(model)
    count_by_range(model)
    copy_selections(model.graph)
    make_runnable(model)
    take_out_activations(model)


def name_apart(model: ir.Model) -> None:
    """Give each value a unique name, in place. An omitted optional output keeps its empty name.

    So do what a graph of an operator outside of ONNX takes and gives: BeamSearch knows these by their names.
    """
    nodes = list(all_nodes(model.graph))
    kept = [(value, "") for node in nodes for value in node.outputs if value.name == ""]
    bodies = [body for node in nodes if node.domain for body in subgraphs(node)]
    kept += [(value, value.name or "") for body in bodies for value in (*body.inputs, *body.outputs)]
    passes.NameFixPass()(model)
    for value, name in kept:
        value.name = name


def replace_cast_like(model: ir.Model) -> None:
    """Replace CastLike by Cast, in place.

    torch's exporter casts constants by CastLike if it does not optimize: they would seem to depend on the value whose
    type they get.
    """
    casts = [node for node in all_nodes(model.graph) if is_onnx(node, "CastLike")]
    if any(node.inputs[1] is not None and node.inputs[1].dtype in UNKNOWN for node in casts):
        add_types(model)
    for node in casts:
        like = node.inputs[1]
        if like is not None and like.dtype not in UNKNOWN:
            node.op_type = "Cast"
            node.attributes["to"] = ir.AttrInt64("to", like.dtype)
            node.resize_inputs(1)


def add_in_pairs(model: ir.Model) -> None:
    """Replace the Sum of two values by Add, in place: older exporters write residuals so."""
    for node in all_nodes(model.graph):
        if is_onnx(node, "Sum") and len(node.inputs) == 2:
            node.op_type = "Add"


def import_where(model: ir.Model) -> None:
    """Import the opset that has Where in place of the two before it, in place, if all nodes mean the same there.

    What ranks add to a partial sum is masked by Where.
    """
    opset = model.graph.opset_imports.get("", WHERE)
    nodes = [node for node in all_nodes(model.graph) if not node.domain]
    if WHERE - 2 <= opset < WHERE and all(_means_the_same(node, opset) for node in nodes):
        for node in nodes:
            node.attributes.pop("spatial", None)
        model.graph.opset_imports[""] = WHERE


def _means_the_same(node: ir.Node, opset: int) -> bool:
    """Whether a node of an opset means the same in the opset that has Where."""
    if node.op_type in _WIDENED:
        return node.attributes.get_int("spatial", 1) == 1
    try:
        return onnx.defs.get_schema(node.op_type, WHERE).since_version <= opset
    except onnx.defs.SchemaError:
        return False


class NameInitializerOutputs(ir.passes.InPlacePass):
    """Insert an Identity before each output that is an initializer, so that each output has a producer."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        indices = [index for index, value in enumerate(model.graph.outputs) if value.producer() is None]
        for index in indices:
            value = model.graph.outputs[index]
            node = ir.node("Identity", [value])
            model.graph.append(node)
            output = node.outputs[0]
            # Another pass may have folded an Identity that was inserted before.
            name, value.name = value.name, unused_name(f"{value.name}_initializer", model.graph.initializers)
            output.name, output.type, output.shape = name, value.type, value.shape
            model.graph.outputs[index] = output
        return ir.passes.PassResult(model, bool(indices))


class SortUnsorted(ir.passes.InPlacePass):
    """Sort nodes topologically, unless they are sorted: then the exporter's order is kept."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        seen: set[ir.Node] = set()
        for node in model.graph:
            producers = (value.producer() for value in node_reads(node))
            if any(producer is not None and producer not in seen for producer in producers):
                return passes.TopologicalSortPass()(model)
            seen.add(node)
        return ir.passes.PassResult(model, False)


class RemoveUnused(ir.passes.InPlacePass):
    """Remove unread nodes and weights. The pass runs only if there are any: the check takes a tenth of its time."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        values = chain(graph.initializers.values(), (value for node in graph for value in node.outputs))
        if all(value.uses() or value.is_graph_output() for value in values) and not has_subgraphs(graph):
            return ir.passes.PassResult(model, False)
        remove_unused(graph)
        return ir.passes.PassResult(model, True)


# Afterwards every node is needed, every output has a producer, and nodes are sorted.
COMPLETE = ir.passes.Sequential(SortUnsorted(), RemoveUnused(), passes.OutputFixPass(), NameInitializerOutputs())


def take_off_passed(graph: ir.Graph) -> tuple[tuple[int, ir.Value], ...]:
    """Remove the outputs that are inputs, in place. Returns them with their indices among the outputs.

    COMPLETE, which would rename such an input, has to run later. Raises ModelError if no output is left.
    """
    passed = tuple((place, value) for place, value in enumerate(graph.outputs) if value.is_graph_input())
    for place, _ in reversed(passed):
        graph.outputs.pop(place)  # `del` would leave the value marked as an output
    if not graph.outputs:
        raise ModelError("the model computes nothing: all its outputs are inputs")
    return passed
