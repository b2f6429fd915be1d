"""Collectives between engines on CPU devices: the C library, without engines and inside ONNX Runtime's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from splitc.runtime.collectives.meeting import Meeting
from splitc.runtime.engines.onnxruntime_cpu import ERRORS, open_session
from splitc.runtime.engines.operator_library import is_built, library_path
from splitc.runtime.errors import PackageError
from tests.conftest import until
from tests.helpers.meetings import KINDS, MAX, SUM, all_reduce, meet, somebody_waits, together

pytestmark = pytest.mark.skipif(not is_built(), reason="splitc was installed without a C compiler")

OK, FAILED, LATE, DIFFERENT, APART = range(5)
TYPES = ["f4", "f8", "f2", ml_dtypes.bfloat16, "i4", "i8", "u4", "i1", "u1"]
CHAIN = 12


# Each type in each kind of memory and by each operation; each number of ranks and operation in each kind.
COMBINED = [
    *((3, SUM, dtype, kind) for dtype in TYPES for kind in KINDS),
    *((3, MAX, dtype, KINDS[0]) for dtype in TYPES),
    *((ranks, operation, "f4", kind) for ranks, operation in ((2, SUM), (3, MAX)) for kind in KINDS[1:]),
    (2, SUM, "f4", KINDS[0]),
]


@pytest.mark.parametrize(("ranks", "operation", "dtype", "kind"), COMBINED)
def test_arrays_are_combined_in_the_order_of_the_ranks(ranks: int, operation: int, dtype: Any, kind: str) -> None:
    ends = meet(ranks, kind=kind)
    sizes = (1, 7, 64, 1000, *([300_000] if kind == "memory" else []))  # more than is staged at a time
    for request, size in enumerate(sizes):
        generator = np.random.default_rng(size)
        parts = [(8 * generator.standard_normal(size)).astype(np.dtype(dtype)) for _ in range(ranks)]

        def work(rank: int, request: int = request, parts: list[Any] = parts) -> tuple[int, Any]:
            ends[rank].begin(request)
            return all_reduce(ends[rank], operation, parts[rank])

        found = together(work, ranks)
        half = np.dtype(dtype).itemsize == 2
        wide = [part.astype(np.float32) if half else part for part in parts]
        expected = wide[0]
        for part in wide[1:]:
            expected = expected + part if operation == SUM else np.maximum(expected, part)
        for status, whole in found:
            assert status == OK
            np.testing.assert_array_equal(whole, expected.astype(np.dtype(dtype)))


# Prints the seconds of processor time that sums of two ranks take, where both may use one core alone: as it is, and as
# with two cores.
ON_ONE_CORE = """
import os, time
import numpy as np
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from splitc.runtime.collectives import meeting
from tests.helpers.meetings import SUM, all_reduce, meet, together
def measure():
    ends = meet(2)
    def work(rank):
        for request in range(1000):
            ends[rank].begin(request)
            all_reduce(ends[rank], SUM, np.zeros(1, np.float32))
    before = time.process_time()
    together(work, 2)
    return time.process_time() - before
print(measure())
meeting.cores = lambda: 2
print(measure())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes can't be bound to cores")
def test_ranks_that_share_a_core_leave_it_to_each_other() -> None:
    """A rank that polls for the other's array would keep it from arriving."""
    done = subprocess.run([sys.executable, "-c", ON_ONE_CORE], capture_output=True, check=True)
    ours, too_long = map(float, done.stdout.split())
    assert ours < too_long / 1.5


# Prints the MiB that a meeting of many ranks takes, and what they sum up, for each kind. By messages one rank sums, and
# gets back what it sends to each other one: all would send each other 67,000.
MANY = """
import sys
import numpy as np
import psutil
from splitc.runtime.collectives.meeting import Meeting
from tests.helpers.meetings import Echo, SUM, all_reduce, meet, together
ranks = int(sys.argv[1])
for kind in sys.argv[2:]:
    before = psutil.Process().memory_info().rss
    ends = meet(ranks, kind=kind) if kind != "messages" else [Meeting(ranks, post=Echo(ranks)).join(0)]
    taken = (psutil.Process().memory_info().rss - before) >> 20
    def work(rank):
        ends[rank].begin(0)
        return all_reduce(ends[rank], SUM, np.ones(1, np.float32))
    print(taken, *{(status, whole.item()) for status, whole in together(work, len(ends))})
"""


def test_many_ranks_meet_and_take_little_memory() -> None:
    ranks = 260  # arrays of 256 were on the stack of the C library
    done = subprocess.run([sys.executable, "-c", MANY, str(ranks), *KINDS], capture_output=True, check=True, text=True)
    for line in done.stdout.splitlines():
        taken, found = line.split(maxsplit=1)
        assert int(taken) < 100 and found == f"(0, {float(ranks)})"
    assert len(done.stdout.splitlines()) == len(KINDS)


def test_more_ranks_than_can_meet_are_refused() -> None:
    with pytest.raises(PackageError, match="take at most 1,024 ranks, and here are 1,025"):
        Meeting(1025)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_that_fails_ends_its_request_alone(kind: str) -> None:
    ends = meet(2, kind=kind)
    array = np.ones(100, np.float32)

    def work(rank: int) -> list[int]:
        found = []
        for request in range(200):
            run = ends[rank].begin(request)
            if (request % 3, rank) == (1, request % 2):
                ends[rank].fail(run)
                found.append(-1)
            else:
                found.append(all_reduce(ends[rank], SUM, array)[0])
        return found

    for request, statuses in enumerate(zip(*together(work, 2), strict=True)):
        assert sorted(statuses) == ([-1, FAILED] if request % 3 == 1 else [OK, OK])


@pytest.mark.parametrize("kind", KINDS)
def test_request_that_fails_after_the_next_has_begun_fails_alone(kind: str) -> None:
    """As on a GPU, which may have the next request already when the first fails. The next one's sums must not fail."""
    ends = meet(2, kind=kind)
    array = np.ones(100, np.float32)

    def work(rank: int) -> int:
        first = ends[rank].begin(0)
        ends[rank].begin(1)
        if rank == 0:
            ends[0].fail(first)
        return all_reduce(ends[rank], SUM, array)[0]

    assert together(work, 2) == [OK, OK]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_in_different_requests_do_not_meet(kind: str) -> None:
    """If one rank was not given a request, it must not sum values of the next one with the others' values."""
    behind, ahead = meet(2, kind=kind)
    array = np.ones(4, np.float32)
    behind.begin(1)
    run = ahead.begin(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(all_reduce, ahead, SUM, array)
        assert all_reduce(behind, SUM, array)[0] == APART
        behind.fail(run)  # so that the other one does not wait for long
        assert waiting.result()[0] != OK


@pytest.mark.parametrize("kind", KINDS)
def test_rank_that_does_not_come_is_waited_for_so_long(kind: str) -> None:
    first, second = meet(2, patience=0.3, kind=kind)
    first.begin(0)
    start = time.monotonic()
    assert all_reduce(first, SUM, np.ones(4, np.float32))[0] == LATE
    assert 0.3 <= time.monotonic() - start < 5
    second.begin(0)
    assert all_reduce(second, SUM, np.ones(4, np.float32))[0] == FAILED

    def again(rank: int) -> int:
        (first, second)[rank].begin(1)
        return all_reduce((first, second)[rank], SUM, np.ones(4, np.float32))[0]

    assert together(again, 2) == [OK, OK]


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_that_differ_are_refused_by_all(kind: str) -> None:
    ends = meet(3, kind=kind)

    def work(rank: int) -> int:
        ends[rank].begin(0)
        return all_reduce(ends[rank], SUM, np.ones(5 if rank == 1 else 4, np.float32))[0]

    assert together(work, 3) == [DIFFERENT] * 3


def test_nobody_waits_after_an_abort() -> None:
    meeting = Meeting(2)
    end = meeting.join(0)
    end.begin(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(all_reduce, end, SUM, np.ones(4, np.float32))
        until(lambda: somebody_waits(meeting))
        meeting.abort()
        assert waiting.result(5)[0] == FAILED
    end.begin(1)
    assert all_reduce(end, SUM, np.ones(4, np.float32))[0] == FAILED


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A model of sums, each of which takes the result and the token of the one before."""
    x = ir.val("x", ir.DataType.FLOAT, ["n", 32])
    value, token, nodes = x, None, []
    for number in range(CHAIN):
        nodes.append(ir.node("Neg", [value]))
        inputs = [nodes[-1].outputs[0], *([] if token is None else [token])]
        nodes.append(ir.node("AllReduce", inputs, {"operation": number % 2}, domain="splitc", num_outputs=2))
        value, token = nodes[-1].outputs
    value.name, value.type, value.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["n", 32])
    graph = ir.Graph([x], [value], nodes=nodes, opset_imports={"": 17, "splitc": 1}, name="chain")
    ir.save(ir.Model(graph, ir_version=8), tmp_path / "chain.onnx")
    return tmp_path / "chain.onnx"


def test_engines_have_the_operator_inside(chain: Path) -> None:
    """Every supported version of ONNX Runtime must pass this test: see `tests.onnxruntime_versions`."""
    ends = meet(2)
    sessions = [open_session(chain, 1, end) for end in ends]
    for request, size in enumerate((1, 3, 200)):
        parts = [np.random.default_rng(seed).standard_normal((size, 32)).astype(np.float32) for seed in range(2)]

        def work(rank: int, request: int = request, parts: list[Any] = parts) -> Any:
            ends[rank].begin(request)
            return sessions[rank].run(None, {"x": parts[rank]})[0]

        expected = parts
        for number in range(CHAIN):
            expected = [-each for each in expected]
            combine = np.maximum if number % 2 else np.add
            expected = [combine(*expected)] * 2
        for found in together(work, 2):
            np.testing.assert_array_equal(found, expected[0])


def test_engine_that_is_loaded_without_a_meeting_says_so(chain: Path) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_path()))
    session = ort.InferenceSession(str(chain), options)
    with pytest.raises(ERRORS, match="loaded without the ranks that it sums with"):
        session.run(None, {"x": np.ones((1, 32), np.float32)})


# Opens and closes sessions, and prints by how many KiB the process has grown. An output keeps the engine of each until
# the next one is there, when its end has no other owner.
MANY_SESSIONS = """
import sys
import numpy as np
import psutil
from splitc.runtime.arrays.ort_values import host_value
from splitc.runtime.engines import LoadOptions
from splitc.runtime.engines.onnxruntime_cpu import OnnxRuntimeBackend
from pathlib import Path
from tests.helpers.meetings import meet
def work():
    end, *_ = [meet(1)[0] for _ in range(20)]
    engine = OnnxRuntimeBackend(1).load(Path(sys.argv[1]), LoadOptions(communicator=end))
    end.begin(0)
    return engine.run({"x": host_value(np.ones((1, 32), np.float32))})
for number in range(150):
    kept = work()
    if number == 50:
        before = psutil.Process().memory_full_info().uss
print((psutil.Process().memory_full_info().uss - before) >> 10, kept["y"].numpy().shape)
"""


def test_ends_go_with_their_engines(chain: Path) -> None:
    """No memory leaks, and none is used after it is freed: Linux's C library overwrites freed memory here."""
    command = [sys.executable, "-c", MANY_SESSIONS, str(chain)]
    done = subprocess.run(command, env={**os.environ, "MALLOC_PERTURB_": "165"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    grown, shape = done.stdout.split(maxsplit=1)
    assert int(grown) < 2500 and shape == "(1, 32)\n"
