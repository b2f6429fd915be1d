"""Copies from the host in a captured graph, with a fake driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from splitc.runtime.errors import EngineError
from splitc.runtime.gpu import graph_nodes
from splitc.runtime.gpu.graph_nodes import Copy, own_what_is_copied

HOST, DEVICE, UNIFIED = 1, 2, 4
GRAPH, INSTANCE, INNER = 7, 8, 9
# Above all addresses of the process.
ON_DEVICE = 1 << 60


def copied(source: int, target: int = ON_DEVICE, width: int = 16, kind: int = UNIFIED) -> Copy:
    copy = Copy(width=width, height=1, depth=1)
    copy.source.kind, copy.target.kind = kind, UNIFIED
    copy.source.device, copy.target.device = (source, target) if kind == UNIFIED else (0, target)
    copy.source.host = source if kind == HOST else None
    return copy


class Driver:
    """Graphs of copies. A node that is None is a kernel, and one that is a list is a graph."""

    def __init__(self, nodes: Sequence[Copy | list[Copy] | None], pinned: Sequence[np.ndarray[Any, Any]]) -> None:
        self._nodes = [None, *nodes]
        self._inner = [each for node in nodes if isinstance(node, list) for each in node]
        self._pinned = [range(each.ctypes.data, each.ctypes.data + each.nbytes) for each in pinned]
        self.replaced: dict[int, int] = {}

    def _node(self, node: Any) -> Copy | list[Copy] | None:
        number: int = node.value
        return self._inner[number - 1000] if number >= 1000 else self._nodes[number]

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        first, found = (1000, self._inner) if graph.value == INNER else (1, self._nodes[1:])
        for place in range(len(found)) if nodes is not None else ():
            nodes[place] = first + place
        count._obj.value = len(found)
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        found = self._node(node)
        kind._obj.value = 0 if found is None else 1 if isinstance(found, Copy) else 4
        return 0

    def cuGraphChildGraphNodeGetGraph(self, node: Any, graph: Any) -> int:
        graph._obj.value = INNER
        return 0

    def cuGraphMemcpyNodeGetParams(self, node: Any, copy: Any) -> int:
        ctypes.pointer(copy._obj)[0] = self._node(node)
        return 0

    def cuPointerGetAttribute(self, kind: Any, attribute: int, address: Any) -> int:
        kind._obj.value = HOST if any(address.value in place for place in self._pinned) else DEVICE
        return int(kind._obj.value == DEVICE and address.value < ON_DEVICE)

    def cuCtxGetCurrent(self, context: Any) -> int:
        return 0

    def cuGraphExecMemcpyNodeSetParams(self, graph: Any, node: Any, copy: Any, context: Any) -> int:
        assert graph.value == INSTANCE and copy._obj.source.kind == HOST
        self.replaced[node.value] = copy._obj.source.host
        return 0


def own(driver: Driver, monkeypatch: pytest.MonkeyPatch, *known: np.ndarray[Any, Any]) -> list[Any]:
    monkeypatch.setattr(graph_nodes, "_driver", lambda: driver)
    graph = SimpleNamespace(graph=GRAPH, graphExec=INSTANCE)
    return own_what_is_copied(graph, known, lambda size: np.zeros(size, np.uint8))


def memory() -> np.ndarray[Any, Any]:
    return np.arange(64, dtype=np.uint8)


@pytest.mark.parametrize("kind", [HOST, UNIFIED])
def test_pinned_memory_of_an_engine_is_kept_as_it_was(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    staged, engines = memory(), memory()
    nodes = [
        None,
        copied(staged.ctypes.data + 8, ON_DEVICE),
        copied(engines.ctypes.data + 4, ON_DEVICE, kind=kind),
        copied(ON_DEVICE, ON_DEVICE),
    ]
    driver = Driver(nodes, [staged, engines])
    (kept,) = own(driver, monkeypatch, staged)
    engines[:] = 0
    assert kept.tolist() == list(range(4, 20))
    assert driver.replaced == {3: kept.ctypes.data}


def test_graph_that_cupy_did_not_keep_is_refused() -> None:
    with pytest.raises(EngineError, match="CuPy before version 14"):
        own_what_is_copied(SimpleNamespace(graph=0, graphExec=INSTANCE), [], lambda size: np.zeros(size, np.uint8))


def test_other_memory_of_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, other = memory(), memory()
    many = copied(pinned.ctypes.data, ON_DEVICE)
    many.height = 2
    for node in (
        copied(other.ctypes.data, ON_DEVICE),
        copied(ON_DEVICE, pinned.ctypes.data),
        many,
        [copied(pinned.ctypes.data, ON_DEVICE)],
    ):
        with pytest.raises(EngineError, match="memory of the host"):
            own(Driver([node], [pinned]), monkeypatch)
