"""The C library of operators, and one built from other sources."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.engines import operator_library
from splitc.runtime.errors import PackageError

pytestmark = pytest.mark.skipif(not operator_library.is_built(), reason="splitc was installed without a C compiler")


def test_library_of_other_sources_is_refused(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """splitc refuses it: ONNX Runtime would only say that an operator is not registered, and not what to do."""
    plan = plan_model(decoder, ["2xcpu"], Request(split_mode="tensor"))
    compile_model(plan, tmp_path / "package", verify=False)
    monkeypatch.setattr(operator_library, "INTERFACE", operator_library.INTERFACE + 1)
    operator_library.load_library.cache_clear()
    with pytest.raises(
        PackageError, match=r"has interface \d+, and its Python code needs \d+: .* Install splitc again"
    ):
        Session(tmp_path / "package")
    with pytest.raises(PackageError, match="Install splitc again"):
        compile_model(plan, tmp_path / "other", verify=False)


class FakeRuntime:
    """ONNX Runtime as the library sees it when it is given to a session: it takes domains and their operators.

    The operator of the number `failing` is not taken, once. A domain takes its time, as if others came meanwhile.
    """

    def __init__(self, failing: int = -1) -> None:
        self.domains: list[int] = []  # the operators of each
        self.given: list[int] = []
        self.released: list[int] = []
        self._failing = failing
        pointer, made = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        entries = {
            26: ctypes.CFUNCTYPE(pointer, ctypes.c_char_p, made)(self._create),
            27: ctypes.CFUNCTYPE(pointer, pointer, pointer)(self._add),
            28: ctypes.CFUNCTYPE(pointer, pointer, pointer)(lambda options, domain: self.given.append(domain)),
            101: ctypes.CFUNCTYPE(None, pointer)(self.released.append),
        }
        api = (pointer * 400)()
        for place, entry in entries.items():
            api[place] = ctypes.cast(entry, pointer)
        get_api = ctypes.CFUNCTYPE(pointer, ctypes.c_uint32)(lambda version: ctypes.addressof(api))
        self.base = (pointer * 2)(ctypes.cast(get_api, pointer))
        self._kept = entries, api, get_api

    def _create(self, name: bytes, made: Any) -> None:
        self.domains.append(0)
        made[0] = len(self.domains)
        time.sleep(0.02)

    def _add(self, domain: int, operator: int) -> int | None:
        failing, self._failing = self._failing == self.domains[domain - 1], -1
        self.domains[domain - 1] += 1
        return 1 if failing else None


@pytest.fixture
def register(tmp_path: Path) -> Callable[[FakeRuntime], object]:
    """Give the library to a session: a copy that this process has not registered yet."""
    library = ctypes.CDLL(str(shutil.copy(operator_library.library_path(), tmp_path)))
    library.RegisterCustomOps.restype = ctypes.c_void_p
    return lambda runtime: library.RegisterCustomOps(None, runtime.base)


def test_threads_that_register_at_once_have_one_domain(register: Callable[[FakeRuntime], object]) -> None:
    runtime = FakeRuntime()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(register, [runtime] * 8)) == {None}
    assert len(runtime.domains) == 1 and runtime.domains[0] > 0
    assert runtime.given == [1] * 8


def test_a_domain_that_lacks_operators_is_not_used(register: Callable[[FakeRuntime], object]) -> None:
    whole = FakeRuntime()
    broken = FakeRuntime(failing=0)
    assert register(broken) == 1
    assert (broken.released, broken.given) == ([1], [])
    assert register(whole) is None
    assert whole.given == [1]


# Takes what memory there is, and then ends of a meeting until there is none.
SHORT = """
import resource
from splitc.runtime.collectives.meeting import Meeting
from splitc.runtime.engines.operator_library import load_library
from splitc.runtime.errors import EngineError
library, meeting = load_library(), Meeting(1)
kept = [bytes(size) for size in range(8, 512, 8) for _ in range(200)]
del kept[::2]  # room for Python's own objects: the error is one
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
try:
    for _ in range(1_000_000):
        library.splitc_end_of_meeting(meeting.address, 0, 1.0)
except EngineError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at how much memory the process has")
def test_no_memory_for_an_end_is_an_error() -> None:
    found = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr) == ("this machine has no memory left for the collectives inside engines\n", "")
