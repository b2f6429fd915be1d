"""Recognizes mixtures of experts that the operator MoE computes: two products of grouped rows, and an activation.

Exporters write an activation in many ways, and the operator knows a few. So what is between the products is run, and
compared with the operator's. The nodes stay as they are, with a mark, until engines are made
(engine_graphs/fused_experts.py): axes, costs and shards are those of the exported nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from splitc.compiler.attention.multi_head import has_attribute
from splitc.compiler.fusion.mixtures import FAILURES, find_sorting, only_sorts
from splitc.compiler.graphs.alone import run_part
from splitc.compiler.graphs.matching import input_orders, is_onnx, made_by
from splitc.compiler.inference.shapes import shape_of
from splitc.compiler.nodes import inputs_of, known_tensor, name_of
from splitc.compiler.operators.row_groups import EXPERTS, RowGroups, find_row_groups, matrices_shape
from splitc.compiler.patterns.context import Context
from splitc.compiler.patterns.errors import NotFusedError
from splitc.compiler.patterns.kernels import Types, check_type
from splitc.runtime.arrays.array import Array

OPERATOR = "MoE"
# How the columns of the first product are divided between gates and the values that they scale.
GATES_FIRST, GATES_LAST, GATES_EVEN, GATES_ODD = "first", "last", "even", "odd"
# The kernels take sizes of 16 and more that are multiples of 8 (16 bytes), see moe.cc and moe_kernels.cu in
# contrib_ops/cuda. The number of an expert must be exact in bfloat16.
LEAST_SIZE, MULTIPLE, MOST_EXPERTS = 16, 8, 256
# Measured on an H200 with ONNX Runtime 1.31: the operator computes 140 TFLOPS, and single products 600, but each
# expert's take 60 us more. So it is faster up to this many operations an expert, and is used where these
# are LEAST_ROWS rows or more: 1,000 tokens that choose 4 experts.
MOST_FLOPS, LEAST_ROWS = 11.9e9, 4096
# The most nodes between two products, and the rows on which an activation is tried. Their numbers are up to twice those
# in its nodes, such as limits, and _LEAST at least. Beyond _MOST, products of two such numbers are infinite in float16.
_MOST_NODES, _ROWS, _LEAST, _MOST = 24, 4, 12.0, 200.0
# Half precision computes an activation in several roundings. The operator's Gelu differs by up to 5e-4 from the exact.
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Activation:
    """What the operator computes between its products: its `attributes`, and where its `gates` are, if it has any.

    `sorts`: rows are sorted only for the products (fusion/mixtures.py).
    """

    attributes: Mapping[str, str | int | float]
    gates: str | None = None
    sorts: bool = False


@dataclass(frozen=True)
class Experts:
    """Two products of grouped rows with the same groups, and the nodes `between`.

    - `made`: the results of the first, with biases. The node that joins them is `joins`.
    - `numbers`: the numbers of the rows' experts, ascending, by which biases are looked up; None without such biases.
    """

    first: RowGroups
    second: RowGroups
    joins: ir.Node
    made: ir.Value
    between: frozenset[ir.Node]
    numbers: ir.Value | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """The size of a row, and that of one inside an expert; (0, 0) if they are not known."""
        first, second = matrices_shape(self.first), matrices_shape(self.second)
        return (0, 0) if first is None or second is None or first[1] != second[2] else (first[1], second[1])

    @property
    def most_rows(self) -> int:
        """Up to how many rows the operator is faster than a product for each expert."""
        row, inner = self.sizes
        return int(self.first.count * MOST_FLOPS / (6 * max(1, row * inner)))


def mark_experts(context: Context) -> Iterator[tuple[str, str | None]]:
    """Mark the experts of a graph that the operator is to compute.

    Yields the name of each mixture's last node, and why it stays as it is (None if it does not).
    """
    graph, types = context.graph.graph, context.gains.experts
    for node, experts in [(node, experts_before(node)) for node in graph] if types else []:
        if experts is None:
            continue
        try:
            activation = _check(graph, experts, types)
        except NotFusedError as error:
            yield name_of(node), str(error)
            continue
        sorting = find_sorting(node.outputs[0], experts.first)
        if sorting is not None and only_sorts(
            graph, sorting, experts.first, node.outputs[0], context.other_sizes.shapes
        ):
            activation = replace(activation, sorts=True)
        node.meta[EXPERTS] = activation
        experts.joins.meta[EXPERTS] = activation
        yield name_of(node), None


def experts_before(node: ir.Node) -> Experts | None:
    """The experts whose last products a node joins; None if there are none."""
    second = find_row_groups(node)
    if second is None:
        return None
    between, left, made = set[ir.Node](), [second.rows], dict[ir.Value, _First]()
    while left and len(between) < _MOST_NODES:
        value = left.pop()
        maker = value.producer()
        first = None if maker is None else _first_product(maker)
        if first is not None and first.groups.ends is second.ends:
            made[value] = first
        elif maker is not None and maker not in between:
            between.add(maker)
            left += inputs_of(maker)
        elif maker is None and known_tensor(value) is None:
            return None
    if left or len(made) != 1:
        return None
    ((result, first),) = made.items()
    inner = {*between, *second.nodes, *first.behind}
    values = [result, *(value for other in (first.joins, *first.behind, *between) for value in other.outputs)]
    if any(use.node not in inner for value in values for use in value.uses()):
        return None
    return Experts(first.groups, second, first.joins, result, frozenset(between), first.numbers)


@dataclass(frozen=True)
class _First:
    """A product of grouped rows, the node that `joins` it, and those `behind` that add biases; see `Experts`."""

    groups: RowGroups
    joins: ir.Node
    behind: tuple[ir.Node, ...] = ()
    numbers: ir.Value | None = None


def _first_product(node: ir.Node) -> _First | None:
    """The product whose results a node joins, or adds biases to that are looked up for each row."""
    if (groups := find_row_groups(node)) is not None:
        return _First(groups, node)
    if not is_onnx(node, "Add"):
        return None
    for value, other in input_orders(node):
        joins = made_by(value, "Concat")
        groups = None if joins is None else find_row_groups(joins)
        lookup = made_by(other, "Gather")
        if joins is None or groups is None or groups.biases is not None or lookup is None:
            continue
        table, numbers = lookup.inputs
        if any(lookup.attributes.get_int(name, 0) for name in ("axis", "batch_dims")) or numbers is None:
            return None
        if table is not None and shape_of(table) == _biases_shape(groups):
            return _First(replace(groups, biases=table), joins, (node, lookup), numbers)
    return None


def _biases_shape(groups: RowGroups) -> tuple[int, ...]:
    shape = matrices_shape(groups)
    return () if shape is None else (groups.count, shape[2])


def fits(experts: Experts) -> bool:
    """Whether the operator's kernels take these sizes."""
    return all(size >= LEAST_SIZE and size % MULTIPLE == 0 for size in experts.sizes)


def computes_gates() -> bool:
    """Whether the installed ONNX Runtime's operator computes gates."""
    return has_attribute(OPERATOR, "swiglu_fusion")


def _check(graph: ir.Graph, experts: Experts, types: Types) -> Activation:
    """The activation of experts that the operator computes faster. Raises NotFusedError for others."""
    check_type(experts.made, types)
    if not computes_gates():
        raise NotFusedError(f"the installed ONNX Runtime's operator {OPERATOR} computes no gates: install a newer one")
    weights = [value for groups in (experts.first, experts.second) for value in (groups.matrices, groups.biases)]
    if any(value is not None and known_tensor(value) is None for value in weights):
        raise NotFusedError("its matrices are not constants")
    if not fits(experts):
        raise NotFusedError(f"the operator takes sizes that are multiples of {MULTIPLE}, from {LEAST_SIZE} on")
    if experts.first.count > MOST_EXPERTS:
        raise NotFusedError(
            f"it has {experts.first.count} experts, and the operator is used for {MOST_EXPERTS} at most"
        )
    if (most := experts.most_rows) < LEAST_ROWS:
        raise NotFusedError(f"from {most} rows on, a product for each of its large experts is faster")
    if experts.numbers is not None and not _are_groups(graph, experts.numbers, experts.first):
        raise NotFusedError("the rows' biases may be those of other experts")
    activation = _find_activation(graph, experts)
    if activation is None:
        raise NotFusedError("what it computes between its products is none of the operator's activations")
    return activation


def _are_groups(graph: ir.Graph, numbers: ir.Value, groups: RowGroups) -> bool:
    """Whether groups end where ascending `numbers`, one a row, go beyond that of the group. Some are tried."""
    random = np.random.default_rng(0)
    for rows in (1, groups.count, 3 * groups.count):
        given = np.sort(random.integers(0, groups.count, rows))
        try:
            (ends,) = run_part(graph, {numbers: given}, [groups.ends])
        except FAILURES:
            return False
        if not np.array_equal(ends, np.searchsorted(given, np.arange(groups.count), "right")):
            return False
    return True


def _find_activation(graph: ir.Graph, experts: Experts) -> Activation | None:
    """The operator's activation that gives the same results as the nodes between the products."""
    first, inner = matrices_shape(experts.first), experts.sizes[1]
    assert first is not None and experts.made.dtype is not None
    numbers = {number for node in experts.between for number in _numbers(node)}
    largest = max(_LEAST, *(2 * abs(number) for number in numbers), 0.0)
    if largest > _MOST:
        return None
    given = np.random.default_rng(0).uniform(-largest, largest, (_ROWS, first[2]))
    given = given.astype(experts.made.dtype.numpy())
    try:
        (made,) = run_part(graph, {experts.made: given}, [experts.second.rows])
    except FAILURES:
        return None
    for activation, compute in _activations(first[2], inner, numbers):
        if made.shape == (_ROWS, inner) and _is_close(made, compute(given.astype(np.float64))):
            return activation
    return None


def _is_close(made: Array, expected: Array) -> bool:
    difference = np.abs(made.astype(np.float64) - expected)
    return bool((difference <= _TOLERANCE * (1 + np.abs(expected))).all())


def _numbers(node: ir.Node) -> Iterator[float]:
    """The scalars of floating point that a node reads."""
    for value in node.inputs:
        tensor = None if value is None else value.const_value
        if tensor is not None and tensor.size == 1 and tensor.dtype.is_floating_point():
            yield float(tensor.numpy().item())


def _activations(
    columns: int, inner: int, numbers: set[float]
) -> Iterator[tuple[Activation, Callable[[Array], Array]]]:
    """The operator's activations for this many columns of the first product, with the `numbers` as parameters."""
    if columns == inner:
        for name, compute in _PLAIN.items():
            yield Activation({"activation_type": name}), compute
    if columns != 2 * inner:
        return
    positive = {number for number in numbers if number > 0}
    factors, added, limits = {1.0, *positive}, {0.0, *numbers}, {np.inf, *positive}
    for gates, alpha, beta, limit in itertools.product(_GATES, sorted(factors), sorted(added), sorted(limits)):
        attributes = {"activation_alpha": alpha, "activation_beta": beta} | (
            {"swiglu_limit": limit} if limit < np.inf else {}
        )
        made = Activation({"activation_type": "swiglu", "swiglu_fusion": 1, **attributes}, gates)

        def compute(given: Array, gates: str = gates, a: float = alpha, b: float = beta, most: float = limit) -> Array:
            gate, value = _GATES[gates](given)
            gate = np.minimum(gate, most)
            return np.asarray(_swish(gate, a) * (np.clip(value, -most, most) + b))

        yield made, compute


def _swish(given: Array, alpha: float = 1.0) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(given / (1 + np.exp(-alpha * given)))


_PLAIN: Mapping[str, Callable[[Array], Array]] = {
    "relu": lambda given: np.maximum(given, 0),
    "silu": _swish,
    "gelu": lambda given: 0.5 * given * (1 + np.tanh(np.sqrt(2 / np.pi) * (given + 0.044715 * given**3))),
}
# Gates and values, by where gates are.
_GATES: Mapping[str, Callable[[Array], tuple[Array, Array]]] = {
    GATES_FIRST: lambda given: (given[:, : given.shape[1] // 2], given[:, given.shape[1] // 2 :]),
    GATES_LAST: lambda given: (given[:, given.shape[1] // 2 :], given[:, : given.shape[1] // 2]),
    GATES_EVEN: lambda given: (given[:, ::2], given[:, 1::2]),
    GATES_ODD: lambda given: (given[:, 1::2], given[:, ::2]),
}
