"""Sizes of inputs that fit together: made up, tried in ONNX Runtime, and changed where it refuses them.

What the graph demands of sizes (as many channels as a Conv's kernel has, a length that its kernel reaches, a cache with
the queries' head size) is not written down for each operator. ONNX Runtime knows: the first node that it refuses alone
shows which inputs are wrong, and of the sizes that are possible for these, those are taken with which it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.frontend.input_sizes import DEFAULT_LENGTH, InputSizes, symbols_of
from splitc.compiler.frontend.reads import node_reads
from splitc.compiler.frontend.shapes import BoundShapes, bind_shapes, bound_model, shape_of
from splitc.compiler.frontend.sizes_tried import Trial, can_be_made_up, first_refused, first_stretched
from splitc.compiler.nodes import describe_node
from splitc.compiler.request.shapes import Shape
from splitc.runtime.package.manifest import Fill

# The most sizes that are changed, one after the other, and the most that are tried for each of these. Both are counts:
# by the clock, a busy machine would refuse what a quiet one finds.
MOST_CHANGES, MOST_TRIES = 32, 500
# A length is doubled up to this size, or counted up to that one.
LARGEST, COUNTED = 1 << 14, 64

# How sizes were tried.
WHOLE, NODES = "the whole model was run", "its nodes were run one by one"

Changes = Mapping[str, int]


@dataclass(frozen=True)
class Fitted:
    """Sizes of inputs, the shapes that they bind, and values of whole numbers that sizes follow from (`fills`).

    `problem` is why the model does not run on them, None if it does. `tried` says how that was found out.
    """

    inputs: InputSizes
    shapes: Mapping[str, Shape]
    bound: BoundShapes
    tried: str
    problem: str | None = None
    fills: Mapping[str, Fill] = field(default_factory=dict)

    @property
    def changes(self) -> Changes:
        """All sizes that are not given."""
        return {**self.inputs.made_up, **self.inputs.stated}


@dataclass(frozen=True)
class _Refused:
    """A node that ONNX Runtime does not run, and why: the model up to it, and the numbers that it has to do with.

    `names` are those of its outputs, `steps` the strides and the like of the nodes above.
    """

    reason: str
    names: frozenset[str | None]
    above: ir.Model
    numbers: Sequence[int]
    steps: Sequence[int]


def fit_sizes(graph: Graph, first: InputSizes, trial: Trial, is_small: Callable[[BoundShapes], bool]) -> Fitted:
    """Change sizes that are made up until the model runs on them: whole if it `is_small`, or else node by node.

    Sizes that are given stay as they are.
    """
    search = _Search(graph, first, trial, is_small)
    if _only_in_caches(graph, first):  # an empty cache demands nothing of its other sizes
        search.inputs = first.changed(dict.fromkeys(first.past, DEFAULT_LENGTH))
        search.fit()
        search.inputs = search.inputs.changed(dict.fromkeys(first.past, 0))
    return search.fit()


def _only_in_caches(graph: Graph, first: InputSizes) -> set[str]:
    """The symbols that only inputs with a growing length have, and that are made up."""
    inputs = [symbols_of(value) for value in graph.graph.inputs]
    elsewhere = frozenset(chain.from_iterable(each for each in inputs if each.isdisjoint(first.past)))
    free = first.made_up.keys() - first.fixed.keys() - first.stated.keys() - first.past - elsewhere
    return {name for each in inputs if not each.isdisjoint(first.past) for name in free & each}


class _Search:
    """The sizes so far. Forms of nodes that ONNX Runtime has accepted are not tried again."""

    def __init__(self, graph: Graph, inputs: InputSizes, trial: Trial, is_small: Callable[[BoundShapes], bool]) -> None:
        self.inputs = inputs
        self._graph = graph
        self._trial = trial
        self._is_small = is_small
        self._declared = {v.name or "": v.shape for node in graph.nodes for v in node.outputs if v.shape is not None}
        self._accepted: set[str] = set()
        self._changed: list[ir.Model] = []
        self._found: list[int] = []  # the sizes that were changed to, which other layers may need too
        self._may_stretch = False

    def fit(self) -> Fitted:
        """Change sizes until the model runs on them, or none are found."""
        for _ in range(MOST_CHANGES):
            fitted, refused = self._try()
            if refused is None:
                return fitted if fitted.problem is None else self._change_by_trial(fitted)
            if self._change(refused):
                continue
            if fitted.problem is not None:
                return fitted
            self._may_stretch = True  # it was right as it was
        return fitted

    def _try(self) -> tuple[Fitted, _Refused | None]:
        """What comes of the sizes so far, and the first node that is wrong with them, if any."""
        model = self._graph.model
        shapes = self.inputs.shapes(model)
        with bound_model(model, shapes, defaults=True) as (bound, found):
            whole = can_be_made_up(self._graph, shapes) and self._is_small(found)
            problem = self._trial.refusal(shapes, {}) if whole else None
            refused = None if whole and problem is None else first_refused(bound, found, self._accepted)
            if refused is not None:
                problem = f"{describe_node(refused[0])} ({refused[0].op_type}): {refused[1]}"
            wrong = refused or (self._stretched(bound, found) if problem is None else None)
            names = frozenset(value.name for value in wrong[0].outputs) if wrong is not None else frozenset()
            numbers = _numbers(wrong[0], found.shapes) if wrong is not None else []
        fitted = Fitted(self.inputs, shapes, found, WHOLE if whole else NODES, problem)
        if wrong is None:
            return fitted, None
        above = _above(model, names)
        return fitted, _Refused(wrong[1], names, above, numbers, _steps(above))

    def _stretched(self, bound: ir.Model, found: BoundShapes) -> tuple[ir.Node, str] | None:
        return None if self._may_stretch else first_stretched(bound, found, self._declared)

    def _change(self, refused: _Refused) -> bool:
        """Change a size, or a few, such that the node runs, and those that were refused before. Whether it is found.

        A change after which the node is refused for another reason is a part of what is needed, as it seems: so the
        search goes on from there.
        """
        symbols = self._free(refused.above)
        tries = count()
        for far in (False, True):
            parts: list[tuple[Changes, str]] = [({}, refused.reason)]
            known = {_kind(refused.reason)}
            while parts:
                part, reason = parts.pop(0)
                near = _near(reason, refused.numbers)
                for more in self._candidates(symbols, near, refused.steps, far, part):
                    if next(tries) >= MOST_TRIES:
                        return False
                    why = self._why_not(refused, {**part, **more})
                    if why is None:
                        return True
                    if why and _kind(why) not in known:
                        known.add(_kind(why))
                        parts.append(({**part, **more}, why))
        return False

    def _why_not(self, refused: _Refused, changes: Changes) -> str | None:
        """Why the node is refused after a change, "" if it is another one; None if none is, and the change is made."""
        changed = self.inputs.changed(changes)
        for model in (refused.above, *self._changed):
            with bound_model(model, changed.shapes(model), defaults=True) as (bound, found):
                again = first_refused(bound, found, self._accepted, leave_large=False) or self._stretched(bound, found)
            if again is not None:
                return again[1] if refused.names & {value.name for value in again[0].outputs} else ""
        self.inputs = changed
        self._changed.append(refused.above)
        self._found = list(dict.fromkeys([*self._found, *changes.values()]))
        return None

    def _change_by_trial(self, fitted: Fitted) -> Fitted:
        """Change sizes, or whole numbers that sizes may follow from, such that the whole model runs."""
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
            # A run that takes too long tells nothing.
            if self._is_small(bound) and self._trial.refusal(shapes, fills) is None:
                # What follows from the numbers is as large as these make it, and as uncertain as before.
                known = bind_shapes(self._graph.model, shapes, _known(self._trial, fills), defaults=True)
                return Fitted(changed, shapes, replace(bound, shapes=known.shapes), fitted.tried, None, fills)
        return fitted

    def _free(self, model: ir.Model) -> list[str]:
        """The symbols of a model's inputs that may be changed: those that are made up, then those that are stated."""
        read = {value.name for node in model.graph for value in node_reads(node)}
        symbols = frozenset(chain.from_iterable(symbols_of(v) for v in model.graph.inputs if v.name in read))
        known = [name for name in (*self.inputs.made_up, *self.inputs.stated) if name not in self.inputs.fixed]
        stated = self.inputs.stated
        return sorted({name: None for name in known if name in symbols}, key=lambda name: name in stated)

    def _candidates(
        self,
        symbols: Sequence[str],
        near: Sequence[int],
        steps: Sequence[int] = (),
        far: bool = False,
        part: Collection[str] = (),
    ) -> Iterator[Changes]:
        """Sizes to try, likely ones first: a cache of one row, or none; doubled ones; those in `near`; many, if `far`.

        Symbols in `part` have been changed already, and are so again alone.
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
        yield from ({name: size} for size in self._found for name in symbols)
        yield from (dict.fromkeys(names, size) for names in groups for size in _grown(sizes[names[0]]))
        yield from (dict.fromkeys(names, size) for size in near for names in (*alone, *groups))
        yield from ({name: size} for name in symbols for size in _grown(sizes[name]))

    def _may_be_nothing(self, name: str) -> bool:
        """Whether a size is only a part of others, as a past length is of a mask's where the model has no caches."""
        changed = self.inputs.changed({name: 0})
        shapes = changed.shapes(self._graph.model)
        reads = [shapes[value.name or ""] for value in self._graph.graph.inputs if name in symbols_of(value)]
        return self.inputs.sizes[name] > 0 and all(size > 0 for shape in reads for size in shape)

    def _groups(self, symbols: Sequence[str]) -> list[tuple[str, ...]]:
        """Symbols of one input that have one size so far: an image's sides, which are equal more often than not."""
        sizes = self.inputs.sizes
        found: dict[tuple[str, ...], None] = {}
        for value in self._graph.graph.inputs:
            own = [name for name in symbols if name in symbols_of(value)]
            for size in {sizes[name] for name in own}:
                names = tuple(name for name in own if sizes[name] == size)
                if len(names) > 1:
                    found[names] = None
        return list(found)


def _number_fills(trial: Trial) -> Iterator[dict[str, Fill]]:
    """Other values for inputs of one whole number: one input after the other, then all."""
    names = [each.name for each in trial.inputs if each.fill == Fill("ones") and each.shape in ([], [1])]
    for size in (2, 4, 8, 16, 32, 64):
        fill = Fill("randint", size, size + 1)
        yield from ({name: fill} for name in names)
        yield dict.fromkeys(names, fill)


def _known(trial: Trial, fills: Mapping[str, Fill]) -> dict[str, npt.NDArray[Any]]:
    """The numbers as arrays."""
    inputs = {each.name: each for each in trial.inputs}
    return {name: np.full(len(inputs[name].shape or ()) * (1,), f.low, inputs[name].dtype) for name, f in fills.items()}


def _grown(size: int) -> Iterator[int]:
    """A size doubled, again and again."""
    size = max(size, 1)
    while size <= LARGEST:
        size *= 2
        yield size


def _numbers(node: ir.Node, shapes: Mapping[str, Shape]) -> list[int]:
    """The numbers that a node has to do with: sizes of its inputs, lists of sizes, attributes, and their divisors."""
    values = [value for value in node.inputs if value is not None]
    weights = [value for value in values if value.const_value is not None]
    sizes = [size for value in (*weights, *values) for size in shape_of(value, shapes)]
    for value in weights:
        tensor = value.const_value
        if tensor is not None and tensor.dtype.is_integer() and tensor.size <= COUNTED:
            sizes += [int(number) for number in tensor.numpy().ravel()]
    for each in node.attributes.values():
        if each.type == ir.AttributeType.INT:
            sizes.append(each.as_int())
        elif each.type == ir.AttributeType.INTS:
            sizes += each.as_ints()
    known = {size for size in sizes if 1 < size <= LARGEST}
    divisors = {number for size in known for number in range(2, size) if size % number == 0}
    return [*sorted(known), *sorted(divisors - known), 1]


def _steps(model: ir.Model) -> list[int]:
    """The lists of numbers that a model's nodes have as attributes: the strides and kernels of convolutions."""
    attributes = (each for node in model.graph for each in node.attributes.values())
    lists = [each.as_ints() for each in attributes if each.type == ir.AttributeType.INTS]
    return sorted({number for numbers in lists for number in numbers if 1 < number <= COUNTED})


def _near(reason: str, numbers: Sequence[int]) -> list[int]:
    """Sizes that a node may need: those that it is refused with, then others."""
    said = [int(number) for number in re.findall(r"\d{1,5}", reason)]
    return list(dict.fromkeys([*(size for size in said if 1 < size <= LARGEST), *numbers]))


def _kind(reason: str) -> str:
    """A reason without its numbers."""
    return re.sub(r"\d+", "", reason)


def _above(model: ir.Model, names: frozenset[str | None]) -> ir.Model:
    """A copy of the model with the nodes that make these values, and all above; the whole if it has no such."""
    copy = model.clone()
    stack = [node for node in copy.graph if names & {value.name for value in node.outputs}]
    kept = set(stack)
    while stack:
        producers = [value.producer() for value in node_reads(stack.pop())]
        above = {node for node in producers if node is not None} - kept
        kept |= above
        stack += above
    if kept:
        copy.graph.outputs.clear()
        copy.graph.remove([node for node in copy.graph if node not in kept][::-1], safe=False)
    return copy
