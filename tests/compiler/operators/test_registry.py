"""The registry is complete: each operator has one entry, and one tiny graph in its family's tests."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from types import ModuleType

import pytest

from splitc.compiler.operators.registry import FAMILIES, REGISTRY

NAMES = [family.__name__.rpartition(".")[2] for family in FAMILIES]


def module_of(family: str) -> ModuleType:
    return import_module(f"tests.compiler.operators.test_{family}")


@pytest.mark.parametrize("family", NAMES)
def test_each_operator_of_a_family_has_one_graph(family: str) -> None:
    """In the table GRAPHS of its tests; WITHOUT_KERNEL lists operators without a CPU kernel."""
    module = module_of(family)
    named = Counter([*module.GRAPHS, *getattr(module, "WITHOUT_KERNEL", ())])
    entries = next(module for module in FAMILIES if module.__name__.endswith(f".{family}")).OPERATORS
    assert named == Counter(operator.name for operator in entries)


def test_entries_are_those_of_the_families() -> None:
    assert list(REGISTRY) == [operator.name for family in FAMILIES for operator in family.OPERATORS]
    assert all(name == operator.name for name, operator in REGISTRY.items())
