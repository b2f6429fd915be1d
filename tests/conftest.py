"""Fixtures and helpers of all tests: small models, packages of them, and comparisons."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from models.llama import Size, build
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.planning.assembly import CpuEngine
from splitc.runtime import Session
from splitc.runtime.errors import typed_options
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.threads.garbage import GARBAGE_AFTER
from tests.helpers import forked
from tests.helpers.analyses import KeptAnalyses
from tests.helpers.feeds import HEAD, HEADS, KV_HEADS, LAYERS, VOCABULARY
from tests.helpers.feeds import Array as Array
from tests.helpers.feeds import Arrays as Arrays
from tests.helpers.feeds import decoder_feeds as decoder_feeds

# Graphs are many objects with long lives: collecting garbage as often as by default takes a tenth of the time.
gc.set_threshold(GARBAGE_AFTER, 50, 50)

# Shells let background jobs ignore SIGINT, and a test that waits for one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The request of tests that are not about split modes.
LAYER = Request(split_mode="layer")

DECODER = Size(LAYERS, hidden=HEADS * HEAD, heads=HEADS, kv_heads=KV_HEADS, feed_forward=160, vocabulary=VOCABULARY)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder for tests, in place of the user's. Test processes that run at the same time share it.

    The script that draws pages, which takes seconds to make, is there from earlier runs.
    """
    here = tmp_path_factory.getbasetemp()
    shared = (here.parent if "PYTEST_XDIST_WORKER" in os.environ else here) / "cache"
    copy_scripts(SCRIPTS, shared / "splitc")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared))
        yield
    copy_scripts(shared / "splitc", SCRIPTS)


def copy_scripts(source: Path, target: Path) -> None:
    """Copy the scripts that the target lacks, each at once, since other test processes may do so too."""
    for script in source.glob("vega-*.js"):
        if not (target / script.name).exists():
            target.mkdir(parents=True, exist_ok=True)
            written = target / f".{script.name}.{os.getpid()}"
            shutil.copyfile(script, written)
            written.replace(target / script.name)


@pytest.fixture(scope="session", autouse=True)
def options_as_typed() -> Iterator[None]:
    """Errors name options as on the command line in all tests. `test_errors.py` tests Python's names."""
    with typed_options():
        yield


KEPT = KeptAnalyses()
# The scripts that earlier runs made: their names have the versions of what makes them.
SCRIPTS = Path(__file__).resolve().parents[1] / ".cache" / "scripts"
# Tests of the runtime patch nothing that analyses read.
RUNTIME = Path(__file__).with_name("runtime")


@pytest.fixture(scope="session", autouse=True)
def kept_analyses() -> Iterator[None]:
    """Analyses of shared models, most of the time of a plan, are cached for all plans that ask the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("splitc.compiler.modes.asked.analyze", KEPT.analyze)
        yield


@pytest.fixture(autouse=True)
def own_analyses(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of the compiler that patches something makes its own analyses, except if none reads what is patched.

    That is so for two fixtures, and for tests that are marked with `kept_analyses`.
    """
    by_itself = "monkeypatch" in signature(request.function).parameters
    by_others = "monkeypatch" in request.fixturenames and {"bare_engines", "gpus"}.isdisjoint(request.fixturenames)
    may_differ = not request.path.is_relative_to(RUNTIME) and request.node.get_closest_marker("kept_analyses") is None
    KEPT.pauses = (by_itself or by_others) and may_differ
    yield
    KEPT.pauses = False


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> Iterator[None]:
    """Ranks' processes are forked from one that has made their imports, which take most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr("splitc.runtime.processes.device_processes.subprocess", forked.SUBPROCESS)
        yield
        forked.FORKING.end()


@pytest.fixture
def children_of_sessions(forked_ranks: None) -> None:
    """This process has no other new children than ranks: that from which they are forked is there before."""
    if sys.platform == "linux":
        forked.FORKING.begin()


@pytest.fixture
def plain_ranks() -> Iterator[None]:
    """Ranks' processes start as for users: for tests of how they start and end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("splitc.runtime.processes.device_processes.subprocess", subprocess)
        forked.FORKING.end()  # so that all children are such ranks
        yield


def saved(size: Size, folders: pytest.TempPathFactory) -> Path:
    """Write a decoder, with its weights beside it, into a folder of its own."""
    path = folders.mktemp("decoder") / "decoder.onnx"
    save(build(size), path)
    KEPT.models.add(path)
    return path


def in_three_stages(model: Path, folders: pytest.TempPathFactory) -> Path:
    """Compile the model in layer mode, into a folder of its own."""
    path = folders.mktemp("package") / "decoder"
    compile_model(plan_model(model, ["3xcpu"], LAYER), path, verify=False)
    return path


@pytest.fixture(scope="session")
def deep_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of four layers with its weights beside it."""
    return saved(replace(DECODER, layers=4), tmp_path_factory)


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of two layers with its weights beside it, which are enough for most tests."""
    return saved(DECODER, tmp_path_factory)


@pytest.fixture
def new_decoder(decoder: Path, tmp_path: Path) -> Path:
    """A copy of the decoder, which no test has analyzed."""
    return shutil.copytree(decoder.parent, tmp_path / "new") / decoder.name


@pytest.fixture(scope="session")
def package(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder as a package of three stages."""
    return in_three_stages(decoder, tmp_path_factory)


def listen_to_interrupts() -> None:
    """For a child process: shells let background jobs, perhaps this test run, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@lru_cache(maxsize=4)
def _open_whole(model: Path, *state: int) -> ort.InferenceSession:
    """A session of the unsplit model, which is kept while the file does not change."""
    return whole_session(model)


def whole_session(model: Path | bytes) -> ort.InferenceSession:
    """A session of an unsplit model, by path or content, on one thread: more would take cores from other tests."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_whole(model: Path, feeds: Mapping[str, Array]) -> Arrays:
    """The unsplit model's outputs in ONNX Runtime."""
    state = model.stat()
    session = _open_whole(model, state.st_mtime_ns, state.st_size)
    used = {value.name: feeds[value.name] for value in session.get_inputs()}
    used.update({v.name: feeds[v.name] for v in session.get_overridable_initializers() if v.name in feeds})
    return dict(zip((value.name for value in session.get_outputs()), session.run(None, used)))


def run_split(model: Path, folder: Path, devices: str, feeds: Mapping[str, Array], **request: Any) -> Arrays:
    """The outputs of a package of the model."""
    shapes = {name: array.shape for name, array in feeds.items()}
    plan = plan_model(model, parse_devices([devices]), Request(**{"split_mode": "layer", "shapes": shapes, **request}))
    compile_model(plan, folder, force=True, verify=False)
    with Session(folder) as session:
        return session.run(feeds)


def assert_close(actual: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float = 1e-5) -> None:
    """Names, types and shapes are equal, and values differ by at most `tolerance` of each output's largest value."""
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert actual[name].shape == array.shape
        largest = float(np.abs(array).max()) if array.size and array.dtype != np.bool_ else 0.0
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=tolerance * largest, err_msg=name)


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[[str], Path]:
    """Write a model given in ONNX's text form."""

    def write(text: str) -> Path:
        path = tmp_path / "model.onnx"
        ir.save(ir.from_onnx_text(text), path)
        return path

    return write


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition that other threads bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def bare_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines need no memory beside weights and values, so that budgets of tiny models are exact."""
    monkeypatch.setattr("splitc.compiler.planning.assembly.CPU_ENGINE", CpuEngine(*[0] * len(fields(CpuEngine))))
