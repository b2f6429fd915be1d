"""Transfers between running engines: splitc.Send, Receive and After, inside ONNX Runtime."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from splitc.runtime.collectives.meeting import Meeting, MeetingEnd
from splitc.runtime.collectives.nccl import NcclCommunicator
from splitc.runtime.engines.onnxruntime_cpu import ERRORS, open_session
from splitc.runtime.engines.operator_library import is_built, library_path, load_library
from tests.conftest import until
from tests.helpers.meetings import KINDS, meet, somebody_waits

pytestmark = pytest.mark.skipif(not is_built(), reason="splitc was installed without a C compiler")

ROUNDS = 5
# In the second one a prompt's value takes many packets.
SIZES = (1, 9000, 0, 3)


def together(*work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [each.result() for each in [pool.submit(each) for each in work]]


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
    """A main rank that sends a value and its sign, multiplies, and receives a helper's numbers, repeatedly."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_engines_send_and_receive(engines: tuple[Path, Path], kind: str) -> None:
    """Every supported version of ONNX Runtime must pass this test: see `tests.onnxruntime_versions`."""
    ends = meet(2, kind=kind)
    main, helper = (open_session(path, 1, end) for path, end in zip(engines, ends, strict=True))
    for request, size in enumerate(SIZES):
        x = np.random.default_rng(size).standard_normal((size, 32)).astype(np.float32)
        for end in ends:
            end.begin(request)
        (found, _), _ = together(lambda x=x: main.run(None, {"x": x}), lambda: helper.run(None, {}))  # type: ignore[misc]
        np.testing.assert_array_equal(found, expected(x))


# Numbers of requests.
_requests = itertools.count()


def begin(ends: list[MeetingEnd]) -> int:
    """Begin the next request. Returns the number of its run, which is the same on all ranks."""
    request = next(_requests)
    (run,) = {end.begin(request) for end in ends}
    return run


@pytest.fixture
def sessions(engines: tuple[Path, Path]) -> Any:
    ends = meet(2, patience=20.0)
    return ends, [open_session(path, 1, end) for path, end in zip(engines, ends, strict=True)]


def run_both(sessions: Any, x: Any) -> Any:
    ends, (main, helper) = sessions
    begin(ends)
    return together(lambda: main.run(None, {"x": x}), lambda: helper.run(None, {}))[0][0]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_rank_that_fails_ends_its_request_alone(sessions: Any, failing: int, count: int, tmp_path: Path) -> None:
    """It fails after it sent a few values, which are discarded. The other rank must not wait for the rest."""
    ends, loaded = sessions
    chain, byte = Chain(), ir.val("byte", ir.DataType.UINT8, [1])
    for _ in range(count):
        chain.transfer("Send", byte, 1 - failing)
    chain.after(byte)
    sender = open_session(chain.save(tmp_path / "sender.onnx", [byte], []), 1, ends[failing])
    x = np.ones((2, 32), np.float32)
    for _ in range(3):
        number = begin(ends)

        def fail(number: int = number) -> None:
            with suppress(*ERRORS):  # the other one does not want them
                sender.run(None, {"byte": np.ones(1, np.uint8)})
            if not count:
                until(lambda: somebody_waits(ends[0]._meeting))
            ends[failing].fail(number)

        def run(number: int = number) -> str:
            # A head that is not that of a float is refused; else the rank waits until it is told.
            with pytest.raises(ERRORS, match=r"another rank failed|another type"):
                loaded[1 - failing].run(None, {"x": x} if failing else {})
            ends[1 - failing].fail(number)
            return "failed"

        assert together(fail, run)[1] == "failed"
        np.testing.assert_array_equal(run_both(sessions, x), expected(x))


def test_rank_that_fails_in_the_midst_of_a_value(sessions: Any) -> None:
    """The sender has filled the channel, and waits for room."""
    ends, (main, _) = sessions
    number = begin(ends)
    big = np.ones((20_000, 32), np.float32)

    def fail() -> None:
        until(lambda: somebody_waits(ends[0]._meeting))
        ends[1].fail(number)

    def run() -> None:
        with pytest.raises(ERRORS, match="another rank failed"):
            main.run(None, {"x": big})

    together(fail, run)
    other = np.full((3, 32), 0.5, np.float32)
    np.testing.assert_array_equal(run_both(sessions, other), expected(other))


def test_nobody_waits_after_an_abort(engines: tuple[Path, Path]) -> None:
    meeting = Meeting(2)
    ends = [meeting.join(rank) for rank in range(2)]
    helper = open_session(engines[1], 1, ends[1])
    begin(ends)

    def run() -> None:
        with pytest.raises(ERRORS, match="another rank failed"):
            helper.run(None, {})

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run)
        until(lambda: somebody_waits(meeting))
        meeting.abort()
        waiting.result(5)
    begin(ends)
    run()


def test_rank_that_does_not_come_is_named(engines: tuple[Path, Path]) -> None:
    ends = meet(2, patience=0.3)
    main, helper = (open_session(path, 1, end) for path, end in zip(engines, ends, strict=True))
    begin(ends)
    start = time.monotonic()
    with pytest.raises(ERRORS, match="rank 0 did not send a value within 0 s"):
        helper.run(None, {})
    assert 0.3 <= time.monotonic() - start < 5
    begin(ends)
    with pytest.raises(ERRORS, match="rank 1 did not receive a value within 0 s"):
        main.run(None, {"x": np.ones((20_000, 32), np.float32)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [(1, 2), (2, 1)])
def test_ranks_in_different_requests_send_each_other_nothing(
    engines: tuple[Path, Path], tmp_path: Path, numbers: tuple[int, int], kind: str
) -> None:
    chain, value = Chain(), ir.val("x", ir.DataType.FLOAT, [1])
    chain.transfer("Send", value, 1)
    ends = meet(2, kind=kind)
    sender = open_session(chain.save(tmp_path / "sender.onnx", [value], []), 1, ends[0])
    receiver = open_session(engines[1], 1, ends[1])
    for end, number in zip(ends, numbers, strict=True):
        end.begin(number)
    sender.run(None, {"x": np.ones(1, np.float32)})
    with pytest.raises(ERRORS, match="ranks were not given the same requests"):
        receiver.run(None, {})


@pytest.mark.parametrize("with_end", [False, True])
def test_engine_without_its_ranks_says_so(engines: tuple[Path, Path], with_end: bool) -> None:
    alone = Meeting(1).join(0)
    if with_end:
        session = open_session(engines[0], 1, alone)
        message = "with a rank that is not there"
    else:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.register_custom_ops_library(str(library_path()))
        session = ort.InferenceSession(str(engines[0]), options)
        message = "loaded without the ranks that it sends to"
    with pytest.raises(ERRORS, match=message):
        session.run(None, {"x": np.ones((1, 32), np.float32)})


@pytest.mark.parametrize("sums", [False, True])
def test_gpus_that_only_send_are_told_of_a_failed_rank(
    engines: tuple[Path, Path], tmp_path: Path, sums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that sum by NCCL may wait forever for a failed rank: the session must end them."""
    anything = load_library().splitc_begin
    functions = SimpleNamespace(ncclAllReduce=anything, ncclSend=anything, ncclRecv=anything)
    monkeypatch.setattr("splitc.runtime.collectives.nccl._load_nccl", lambda: functions)
    meeting = Meeting(2)
    first, second = meeting.join(0), NcclCommunicator(Future())
    assert not second.fail(0)
    second.meet(meeting, 1)
    first.begin(0)
    number = second.begin(0)
    main = open_session(engines[0], 1, first)
    open_session(engines[1], 1, second)
    if sums:
        x = ir.val("x", ir.DataType.FLOAT, ["n"])
        node = ir.node("AllReduce", [x], {"operation": 0}, domain="splitc", num_outputs=2)
        node.outputs[0].name, node.outputs[0].type = "y", x.type
        graph = ir.Graph([x], node.outputs[:1], nodes=[node], opset_imports={"": 17, "splitc": 1}, name="sum")
        ir.save(ir.Model(graph, ir_version=8), tmp_path / "sum.onnx")
        open_session(tmp_path / "sum.onnx", 1, second)
    assert second.fail(number) == (not sums)
    with pytest.raises(ERRORS, match="another rank failed"):
        main.run(None, {"x": np.ones((1, 32), np.float32)})
