"""What engines of ranks send to each other while they run: splitc.Send, Receive and After, inside ONNX Runtime's."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from splitc.runtime.collectives.engine_meeting import LINE, EngineMeeting, MeetingEnd, shared_bytes
from splitc.runtime.engines.onnxruntime_cpu import ERRORS, open_session
from splitc.runtime.engines.operator_library import is_built, library_path

pytestmark = pytest.mark.skipif(not is_built(), reason="splitc was installed without a C compiler")

ROUNDS = 5
# In the second one a prompt's value takes many packets.
SIZES = (1, 9000, 0, 3)


def together(*work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [each.result() for each in [pool.submit(each) for each in work]]


def meet(ranks: int, patience: float = 20.0, shared: bool = False) -> tuple[EngineMeeting, list[MeetingEnd]]:
    memory = None
    if shared:
        room = np.zeros(shared_bytes(ranks) + LINE, np.uint8)
        memory = room[-room.ctypes.data % LINE :]
    meeting = EngineMeeting(ranks, memory)
    return meeting, [meeting.join(rank, patience) for rank in range(ranks)]


class Chain:
    """A graph of operators that are chained by their tokens."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.token: ir.Value | None = None

    def op(self, kind: str, *inputs: ir.Value) -> ir.Value:
        self.nodes.append(ir.node(kind, inputs))
        return self.nodes[-1].outputs[0]

    def transfer(self, kind: str, value: ir.Value, peer: int) -> ir.Value:
        inputs = [value, *([] if self.token is None else [self.token])]
        self.nodes.append(ir.node(kind, inputs, {"peer": peer}, domain="splitc", num_outputs=2))
        given, self.token = self.nodes[-1].outputs
        return given

    def like(self, kind: Any) -> ir.Value:
        """An empty value of this type."""
        tensor = ir.tensor(np.zeros(0, kind), name=f"like{len(self.weights)}")
        self.weights.append(ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(tensor.dtype)))
        return self.weights[-1]

    def after(self, *values: ir.Value) -> None:
        inputs = [*([] if self.token is None else [self.token]), *values]
        self.nodes.append(ir.node("After", inputs, domain="splitc"))
        self.token = self.nodes[-1].outputs[0]

    def save(self, path: Path, inputs: list[ir.Value], outputs: list[ir.Value]) -> Path:
        assert self.token is not None
        self.token.name, self.token.type = "token", ir.TensorType(ir.DataType.UINT8)
        graph = ir.Graph(
            inputs,
            [*outputs, self.token],
            nodes=self.nodes,
            initializers=self.weights,
            opset_imports={"": 17, "splitc": 1},
            name="chain",
        )
        ir.save(ir.Model(graph, ir_version=8), path)
        return path


@pytest.fixture
def engines(tmp_path: Path) -> tuple[Path, Path]:
    """A main rank that sends a value and its sign, multiplies, and takes a helper's numbers, again and again."""
    chain, x = Chain(), ir.val("x", ir.DataType.FLOAT, ["n", 32])
    value = x
    for _ in range(ROUNDS):
        passed = chain.transfer("Send", value, 1)
        chain.transfer("Send", chain.op("Ceil", value), 1)
        own = chain.op("Neg", passed)
        chain.after(own)
        other = chain.transfer("Receive", chain.like(np.float32), 1)
        value = chain.op("Add", own, other)
    value.name, value.type, value.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["n", 32])
    main = chain.save(tmp_path / "main.onnx", [x], [value])
    chain = Chain()
    for _ in range(ROUNDS):
        value = chain.transfer("Receive", chain.like(np.float32), 0)
        high = chain.transfer("Receive", chain.like(np.float32), 0)
        made = chain.op("Mul", chain.op("Abs", value), high)
        chain.after(made)
        chain.transfer("Send", made, 0)
    return main, chain.save(tmp_path / "helper.onnx", [], [])


def expected(x: Any) -> Any:
    for _ in range(ROUNDS):
        x = -x + np.abs(x) * np.ceil(x)
    return x


@pytest.mark.parametrize("shared", [False, True])
def test_engines_send_and_receive(engines: tuple[Path, Path], shared: bool) -> None:
    """A test that every supported version of ONNX Runtime must pass: see `tests.onnxruntime_versions`."""
    _, ends = meet(2, shared=shared)
    main, helper = (open_session(path, 1, end) for path, end in zip(engines, ends, strict=True))
    for size in SIZES:
        x = np.random.default_rng(size).standard_normal((size, 32)).astype(np.float32)
        for end in ends:
            end.begin()
        (found, _), _ = together(lambda x=x: main.run(None, {"x": x}), lambda: helper.run(None, {}))  # type: ignore[misc]
        np.testing.assert_array_equal(found, expected(x))
