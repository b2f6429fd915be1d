"""Tries the rules of the nodes that a choice of axes shards."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from splitc.compiler.frontend.graph import Graph
from splitc.compiler.nodes import operator_name
from splitc.compiler.request.shapes import Shape
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.choice import Choice
from splitc.compiler.trials.forms import Form, find_forms
from splitc.compiler.trials.known import keep_trials, known_trials
from splitc.compiler.trials.running import UNTRIED, try_forms

BROKEN = "its rule did not hold: "


def find_broken(graph: Graph, axis_map: AxisMap, choice: Choice, planned: Mapping[str, Shape]) -> dict[ir.Node, str]:
    """The nodes that can't be sharded as chosen, since their operator's rule does not hold, each with the reason.

    One node of each form runs in ONNX Runtime at tiny sizes, whole and in uneven shards, as the lowering makes them.
    `planned` are the planned shapes, by name. A form that can't be tried may be possible to try with other planned
    shapes, so that result is not kept.
    """
    versions = graph.graph.opset_imports
    forms = list(find_forms(axis_map, choice, versions, planned))
    distinct: Mapping[str, Form] = {form.digest: form for _, form in forms}
    known = known_trials()
    if new := [form for digest, form in distinct.items() if digest not in known]:
        results = try_forms(new, versions, axis_map.bound)
        keep_trials({digest: why for digest, why in results.items() if not why.startswith(UNTRIED)})
        known = {**known, **results}
    return {node: _reason(why) for node, form in forms if (why := known[form.digest])}


def _reason(why: str) -> str:
    return why if why.startswith(UNTRIED) else f"{BROKEN}{why}"


def broken_rules(broken: Mapping[ir.Node, str]) -> list[str]:
    """A warning for each operator whose rule did not hold; none for operators that could not be tried."""
    reasons: dict[str, list[str]] = {}
    for node, reason in broken.items():
        if reason.startswith(BROKEN):
            reasons.setdefault(operator_name(node), []).append(reason)
    return [
        f"{name} stays whole in {len(own)} nodes: tried in shards, {own[0]}. Results are right, but ranks hold more "
        "than they need to: please report it"
        for name, own in reasons.items()
    ]
