"""What each operator means for the axes of its inputs and outputs: one small function an operator family.

To add an operator, add its name to a rule that fits, or write a rule: a function of an `Operation` that relates axes,
contracts or pins them, and records what a rank must rewrite. Then add a test to tests/compiler/split/test_rules.py.
What a rule did not touch is pinned, so one that meets a form that it can't follow just returns.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from splitc.compiler.nodes import operator_name
from splitc.compiler.operators.operation import Operation

Rule = Callable[[Operation], None]
RULES: dict[str, Rule] = {}


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators; those of another domain than ONNX's own are named as in `com.microsoft.Gelu`."""

    def register(function: Rule) -> Rule:
        for operator in operators:
            assert operator not in RULES, operator
            RULES[operator] = function
        return function

    return register


def apply_rule(operation: Operation) -> None:
    """Relate the axes of one node. An operator without a rule needs everything whole."""
    node = operation.node
    known = RULES.get(operator_name(node))
    shapes = (*zip(node.inputs, operation.inputs), *zip(node.outputs, operation.outputs))
    if known is None or any(value is not None and value.name and axes is None for value, axes in shapes):
        operation.opaque()
        return
    known(operation)
    operation.finish()


for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
