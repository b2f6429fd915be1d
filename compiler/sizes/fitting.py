"""Finds sizes of inputs that fit together: default sizes are tried in ONNX Runtime, and changed if it refuses them.

splitc has no rules of what each operator requires (as many channels as a Conv's kernel, a length that holds its kernel,
a cache with the queries' head size): ONNX Runtime has. The first node that it refuses shows which inputs have wrong
sizes. Other sizes of these inputs are tried until the node runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count, islice

import numpy as np
import onnx_ir as ir

from splitc.compiler.graphs.reads import node_reads
from splitc.compiler.graphs.walks import ancestors
from splitc.compiler.inference.shapes import BoundShapes, bind_shapes, bound_model, shape_of
from splitc.compiler.nodes import describe_node, inputs_of
from splitc.compiler.normal_form.graph import Graph
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sizes.inputs import DEFAULT_LENGTH, InputSizes, symbols_of
from splitc.compiler.sizes.tried import (
    Trial,
    can_be_made_up,
    crashes,
    first_emptied,
    first_refused,
    first_stretched,
)
from splitc.runtime.arrays.array import Array
from splitc.runtime.package.manifest import Fill

# The most changes of sizes in sequence, and the most tries for each. Counts rather than seconds, so that a busy machine
# finds the same sizes. A choice, to bound the search.
MOST_CHANGES, MOST_TRIES = 32, 500
# Lengths are tried by doubling up to LARGEST, or one by one up to COUNTED. A choice: images and sounds have up to some
# thousand positions per side, and lengths that divide no power of two (windows, patches) are small.
LARGEST, COUNTED = 1 << 14, 64

# How sizes were tried.
WHOLE, NODES = "the whole model was run", "its nodes were run one by one"
KNOWN_NODES = f"{NODES}, but for those that this machine's CPU has no kernel for"

Changes = Mapping[str, int]


@dataclass(frozen=True)
class Fitted:
    """Sizes of inputs, and the shapes of all values with them (`bound`).

    - `problem`: why the model does not run on these sizes; None if it does.
    - `tried`: how that was determined: WHOLE, NODES or KNOWN_NODES.
    - `fills`: how to fill integer inputs that sizes depend on.
    """

    inputs: InputSizes
    shapes: Mapping[str, Shape]
    bound: BoundShapes
    tried: str
    problem: str | None = None
    fills: Mapping[str, Fill] = field(default_factory=dict)

    @property
    def changes(self) -> Changes:
        """All sizes that the user did not give."""
        return {**self.inputs.made_up, **self.inputs.stated}


@dataclass(frozen=True)
class _Refused:
    """A node that ONNX Runtime does not run, and the reason.

    - `names`: the names of its outputs.
    - `above`: a model of the node and all nodes that it depends on.
    - `numbers`: numbers in the node's input shapes and attributes, which may be the needed size.
    - `steps`: strides, kernels and the like of the nodes above, of which the needed size may be a multiple.
    """

    reason: str
    names: frozenset[str | None]
    above: ir.Model
    numbers: Sequence[int]
    steps: Sequence[int]


def fit_sizes(graph: Graph, first: InputSizes, trial: Trial, is_small: Callable[[BoundShapes], bool]) -> Fitted:
    """Change made-up sizes until the model runs on them: whole if it `is_small`, else node by node.

    Given sizes stay as they are.
    """
    search = _Search(graph, first, trial, is_small)
    if _only_in_caches(graph, first):  # with an empty cache, its other sizes would not be tested
        search.inputs = first.changed(dict.fromkeys(first.past, DEFAULT_LENGTH))
        search.fit()
        search.inputs = search.inputs.changed(dict.fromkeys(first.past, 0))
    return search.fit()


def _only_in_caches(graph: Graph, first: InputSizes) -> set[str]:
    """The made-up symbols that occur only in inputs with a growing length."""
    inputs = [symbols_of(value) for value in graph.graph.inputs]
    elsewhere = frozenset(chain.from_iterable(symbols for symbols in inputs if symbols.isdisjoint(first.past)))
    free = first.made_up.keys() - first.fixed.keys() - first.stated.keys() - first.past - elsewhere
    return {name for symbols in inputs if not symbols.isdisjoint(first.past) for name in free & symbols}


class _Search:
    """The search for sizes. Forms of nodes that ONNX Runtime has accepted are not tried again."""

    def __init__(self, graph: Graph, inputs: InputSizes, trial: Trial, is_small: Callable[[BoundShapes], bool]) -> None:
        self.inputs = inputs
        self._graph = graph
        self._trial = trial
        self._is_small = is_small
        self._declared = {v.name or "": v.shape for node in graph.nodes for v in node.outputs if v.shape is not None}
        self._accepted: set[Hashable] = set()
        self._changed: list[ir.Model] = []
        self._new_sizes: list[int] = []  # the sizes that were changed to, which other layers may need too
        self._may_be_odd = False

    def fit(self) -> Fitted:
        """Change sizes until the model runs on them, or until there are no more to try."""
        for _ in range(MOST_CHANGES):
            fitted, refused = self._try()
            if refused is None:
                return fitted if fitted.problem is None else self._change_by_trial(fitted)
            if self._change(refused):
                continue
            if fitted.problem is not None:
                return fitted
            self._may_be_odd = True  # no size makes it less odd: the broadcast or the window is intended
        return fitted

    def _try(self) -> tuple[Fitted, _Refused | None]:
        """Try the sizes so far. Returns the result, and the first node for which they are wrong, if any."""
        model = self._graph.model
        shapes = self.inputs.shapes(model)
        with bound_model(model, shapes, defaults=True) as (bound_copy, bound):
            may_run = can_be_made_up(self._graph, shapes) and self._is_small(bound)
            may_run = may_run and not any(crashes(node, bound.shapes) is not None for node in bound_copy.graph)
            whole = may_run and self._trial.has_kernels
            problem = self._trial.refusal(shapes, {}) if whole else None
            refused = None if whole and problem is None else first_refused(bound_copy, bound, self._accepted)
            if refused is not None:
                problem = f"{describe_node(refused[0])}: {refused[1]}"
            wrong = refused or (self._odd(bound_copy, bound) if problem is None else None)
            names = frozenset(value.name for value in wrong[0].outputs) if wrong is not None else frozenset()
            numbers = _numbers(wrong[0], bound.shapes) if wrong is not None else []
        tried = WHOLE if whole else KNOWN_NODES if may_run else NODES
        fitted = Fitted(self.inputs, shapes, bound, tried, problem)
        if wrong is None:
            return fitted, None
        above = _above(model, names)
        return fitted, _Refused(wrong[1], names, above, numbers, _steps(above))

    def _odd(self, model: ir.Model, bound: BoundShapes) -> tuple[ir.Node, str] | None:
        """The first node whose sizes are hardly intended, although ONNX Runtime runs it; None if there is none."""
        if self._may_be_odd:
            return None
        return first_emptied(model, bound) or first_stretched(model, bound, self._declared)

    def _change(self, refused: _Refused) -> bool:
        """Change sizes so that this node, and those refused before it, run. Returns whether that succeeded.

        If a change makes ONNX Runtime refuse the node for another reason, further changes are tried on top of it.
        """
        symbols = self._free(refused.above)
        tries, known = count(), dict[frozenset[tuple[str, int]], str | None]()
        for far in (False, True):
            queue: list[tuple[Changes, str]] = [({}, refused.reason)]
            reasons = {_kind(refused.reason)}
            while queue:
                part, reason = queue.pop(0)
                near = _near(reason, refused.numbers)
                for more in self._candidates(symbols, near, refused.steps, far, part):
                    if next(tries) >= MOST_TRIES:
                        return False
                    changes = {**part, **more}
                    sizes = frozenset(self.inputs.changed(changes).sizes.items())
                    if sizes not in known:  # several ways lead to the same sizes
                        known[sizes] = self._why_not(refused, changes, reasons)
                    why = known[sizes]
                    if why is None:
                        self._keep(refused, changes)
                        return True
                    if why and _kind(why) not in reasons:
                        reasons.add(_kind(why))
                        queue.append((changes, why))
        return False

    def _why_not(self, refused: _Refused, changes: Changes, reasons: Collection[str]) -> str | None:
        """Why the node is refused after a change; "" if another node is, None if none is.

        If it is refused for one of the known `reasons`, the nodes before it are not tried.
        """
        changed = self.inputs.changed(changes)
        for model in (refused.above, *self._changed):
            with bound_model(model, changed.shapes(model), defaults=True) as (copy, bound):
                tried = partial(first_refused, copy, bound, self._accepted, leave_large=False)
                again = tried(names=refused.names) if model is refused.above else None
                if again is None or _kind(again[1]) not in reasons:
                    again = tried() or self._odd(copy, bound)
            if again is not None:
                return again[1] if refused.names & {value.name for value in again[0].outputs} else ""
        return None

    def _keep(self, refused: _Refused, changes: Changes) -> None:
        self.inputs = self.inputs.changed(changes)
        self._changed.append(refused.above)
        self._new_sizes = list(dict.fromkeys([*self._new_sizes, *changes.values()]))

    def _change_by_trial(self, fitted: Fitted) -> Fitted:
        """Change sizes, or the values of integer inputs that sizes may depend on, so that the whole model runs."""
        candidates = chain(
            ((fills, {}) for fills in _number_fills(self._trial)),
            (({}, changes) for changes in self._candidates(self._free(self._graph.model), ())),
        )
        for fills, changes in islice(candidates, MOST_TRIES):
            changed = self.inputs.changed(changes)
            shapes = changed.shapes(self._graph.model)
            if not can_be_made_up(self._graph, shapes):
                continue
            bound = fitted.bound if shapes == fitted.shapes else bind_shapes(self._graph.model, shapes, defaults=True)
            # A run that takes too long proves nothing.
            if self._is_small(bound) and self._trial.refusal(shapes, fills) is None:
                # Sizes that depend on the integers follow from these, and are as uncertain as before.
                known = bind_shapes(self._graph.model, shapes, _known(self._trial, fills), defaults=True)
                return Fitted(changed, shapes, replace(bound, shapes=known.shapes), fitted.tried, None, fills)
        return fitted

    def _free(self, model: ir.Model) -> list[str]:
        """The symbols of a model's inputs that may be changed: made-up ones, then stated ones."""
        read = {value.name for node in model.graph for value in node_reads(node)}
        symbols = frozenset(chain.from_iterable(symbols_of(v) for v in model.graph.inputs if v.name in read))
        free = [name for name in (*self.inputs.made_up, *self.inputs.stated) if name not in self.inputs.fixed]
        stated = self.inputs.stated
        return sorted({name: None for name in free if name in symbols}, key=lambda name: name in stated)

    def _candidates(
        self,
        symbols: Sequence[str],
        near: Sequence[int],
        steps: Sequence[int] = (),
        far: bool = False,
        part: Collection[str] = (),
    ) -> Iterator[Changes]:
        """Changes to try, likely ones first: a cache of one row or none; doubled sizes; the sizes `near`.

        If `far`, instead all small sizes, and multiples of `steps`. Symbols in `part` have been changed already: they
        are changed again one at a time, not in groups.
        """
        sizes = self.inputs.sizes
        groups = self._groups([name for name in symbols if name not in part])
        alone = [(name,) for name in symbols]
        if far:
            counted = [step * count for step in (*steps, 1) for count in range(1, COUNTED + 1)]
            yield from (dict.fromkeys(names, size) for names in groups for size in counted)
            yield from (dict.fromkeys(names, size) for size in counted for names in alone)
            return
        yield from ({name: 1} for name in symbols if name in self.inputs.past and sizes[name] == 0)
        yield from ({name: 0} for name in symbols if self._may_be_nothing(name))
        yield from ({name: size} for size in self._new_sizes for name in symbols)
        yield from (dict.fromkeys(names, size) for names in groups for size in _grown(sizes[names[0]]))
        yield from (dict.fromkeys(names, size) for size in near for names in (*alone, *groups))
        yield from ({name: size} for name in symbols for size in _grown(sizes[name]))

    def _may_be_nothing(self, name: str) -> bool:
        """Whether no input is empty if this size is 0: it only occurs in sums, as a past length in that of a mask."""
        changed = self.inputs.changed({name: 0})
        shapes = changed.shapes(self._graph.model)
        reads = [shapes[value.name or ""] for value in self._graph.graph.inputs if name in symbols_of(value)]
        return self.inputs.sizes[name] > 0 and all(size > 0 for shape in reads for size in shape)

    def _groups(self, symbols: Sequence[str]) -> list[tuple[str, ...]]:
        """Groups of symbols of one input with the same size so far, such as an image's sides."""
        sizes = self.inputs.sizes
        groups: dict[tuple[str, ...], None] = {}
        for value in self._graph.graph.inputs:
            own = [name for name in symbols if name in symbols_of(value)]
            for size in {sizes[name] for name in own}:
                names = tuple(name for name in own if sizes[name] == size)
                if len(names) > 1:
                    groups[names] = None
        return list(groups)


def _number_fills(trial: Trial) -> Iterator[dict[str, Fill]]:
    """Other values for integer inputs of one element: for one input at a time, then for all."""
    names = [tensor.name for tensor in trial.inputs if tensor.fill == Fill("ones") and tensor.shape in ([], [1])]
    for size in (2, 4, 8, 16, 32, 64):
        fill = Fill("randint", size, size + 1)
        yield from ({name: fill} for name in names)
        yield dict.fromkeys(names, fill)


def _known(trial: Trial, fills: Mapping[str, Fill]) -> dict[str, Array]:
    """The fills as arrays."""
    inputs = {tensor.name: tensor for tensor in trial.inputs}
    return {name: np.full(len(inputs[name].shape or ()) * (1,), f.low, inputs[name].dtype) for name, f in fills.items()}


def _grown(size: int) -> Iterator[int]:
    """A size, doubled again and again until it exceeds LARGEST."""
    size = max(size, 1)
    while size <= LARGEST:
        size *= 2
        yield size


def _numbers(node: ir.Node, shapes: Mapping[str, Shape]) -> list[int]:
    """Numbers that occur in a node: sizes of its inputs, lists of sizes, attributes, and their divisors."""
    values = inputs_of(node)
    weights = [value for value in values if value.const_value is not None]
    sizes = [size for value in (*weights, *values) for size in shape_of(value, shapes)]
    for value in weights:
        tensor = value.const_value
        if tensor is not None and tensor.dtype.is_integer() and tensor.size <= COUNTED:
            sizes += [int(number) for number in tensor.numpy().ravel()]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.INT:
            sizes.append(attribute.as_int())
        elif attribute.type == ir.AttributeType.INTS:
            sizes += attribute.as_ints()
    numbers = {size for size in sizes if 1 < size <= LARGEST}
    divisors = {number for size in numbers for number in range(2, size) if size % number == 0}
    return [*sorted(numbers), *sorted(divisors - numbers), 1]


def _steps(model: ir.Model) -> list[int]:
    """The numbers in list attributes of a model's nodes: strides and kernels of convolutions."""
    attributes = (attribute for node in model.graph for attribute in node.attributes.values())
    lists = [attribute.as_ints() for attribute in attributes if attribute.type == ir.AttributeType.INTS]
    return sorted({number for numbers in lists for number in numbers if 1 < number <= COUNTED})


def _near(reason: str, numbers: Sequence[int]) -> list[int]:
    """Sizes that a node may need: the numbers in the error message first."""
    named = [int(number) for number in re.findall(r"\d{1,5}", reason)]
    return list(dict.fromkeys([*(size for size in named if 1 < size <= LARGEST), *numbers]))


def _kind(reason: str) -> str:
    """The reason with its numbers removed, to compare reasons."""
    return re.sub(r"\d+", "", reason)


def _above(model: ir.Model, names: frozenset[str | None]) -> ir.Model:
    """A copy of the model with only the ancestors of these values; of the whole model if no node computes them."""
    copy = model.clone()
    kept = ancestors([node for node in copy.graph if names & {value.name for value in node.outputs}], node_reads)
    if kept:
        copy.graph.outputs.clear()
        copy.graph.remove([node for node in copy.graph if node not in kept][::-1], safe=False)
    return copy
