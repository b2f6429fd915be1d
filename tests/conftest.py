"""Small models, and what the tests share."""

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

# Graphs are many objects that live long: to look for garbage as often as by default takes a tenth of the time.
gc.set_threshold(GARBAGE_AFTER, 50, 50)

# A shell lets what it starts in the background ignore SIGINT: a test that waits for one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What tests ask for that are not about the choice of a mode.
LAYER = Request(split_mode="layer")

DECODER = Size(LAYERS, hidden=HEADS * HEAD, heads=HEADS, kv_heads=KV_HEADS, feed_forward=160, vocabulary=VOCABULARY)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What splitc keeps of a machine: tests leave the user's alone. Those that run at the same time share one."""
    here = tmp_path_factory.getbasetemp()
    shared = here.parent if "PYTEST_XDIST_WORKER" in os.environ else here
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def options_as_typed() -> Iterator[None]:
    """Errors name options in one way in all tests: as on the command line. `test_errors.py` has Python's names."""
    with typed_options():
        yield


KEPT = KeptAnalyses()


@pytest.fixture(scope="session", autouse=True)
def kept_analyses() -> Iterator[None]:
    """The decoders are analyzed once for all plans that ask the same of them, which is most of what a plan takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("splitc.compiler.modes.asked.analyze", KEPT.analyze)
        yield


@pytest.fixture(autouse=True)
def own_analyses(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that patches something has analyses of its own. No analysis reads what these two fixtures patch."""
    by_itself = "monkeypatch" in signature(request.function).parameters
    by_others = "monkeypatch" in request.fixturenames and {"bare_engines", "gpus"}.isdisjoint(request.fixturenames)
    KEPT.pauses = by_itself or by_others
    yield
    KEPT.pauses = False


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> Iterator[None]:
    """Processes of ranks have imported all that they import, which takes most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr("splitc.runtime.processes.device_processes.subprocess", forked.SUBPROCESS)
        yield
        forked.FORKING.end()


@pytest.fixture(scope="module")
def plain_ranks() -> Iterator[None]:
    """Processes of ranks start as users' do: for tests of how they start and end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("splitc.runtime.processes.device_processes.subprocess", subprocess)
        forked.FORKING.end()  # so that all children are such ranks
        yield


def saved(size: Size, folders: pytest.TempPathFactory) -> Path:
    """A decoder with its weights beside it, in a folder of its own."""
    path = folders.mktemp("decoder") / "decoder.onnx"
    save(build(size), path)
    KEPT.models.add(path)
    return path


def in_three_stages(model: Path, folders: pytest.TempPathFactory) -> Path:
    """A package of the model in layer mode, in a folder of its own."""
    path = folders.mktemp("package") / "decoder"
    compile_model(plan_model(model, ["3xcpu"], LAYER), path)
    return path


@pytest.fixture(scope="session")
def deep_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of four layers with its weights beside it."""
    return saved(replace(DECODER, layers=4), tmp_path_factory)


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of two layers with its weights beside it: what holds of them holds of more."""
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
    """For a child process: a shell lets what it starts in the background ignore SIGINT, this test run perhaps."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@lru_cache(maxsize=4)
def _open_whole(model: Path, *state: int) -> ort.InferenceSession:
    """The unsplit model in a session, which is kept while the file is as it was."""
    return whole_session(model)


def whole_session(model: Path | bytes) -> ort.InferenceSession:
    """A model or its content, unsplit, on one thread: several would spin on cores of which other tests have need."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_whole(model: Path, feeds: Mapping[str, Array]) -> Arrays:
    """What ONNX Runtime gives for the unsplit model."""
    state = model.stat()
    session = _open_whole(model, state.st_mtime_ns, state.st_size)
    used = {value.name: feeds[value.name] for value in session.get_inputs()}
    used.update({v.name: feeds[v.name] for v in session.get_overridable_initializers() if v.name in feeds})
    return dict(zip((value.name for value in session.get_outputs()), session.run(None, used)))


def run_split(model: Path, folder: Path, devices: str, feeds: Mapping[str, Array], **request: Any) -> Arrays:
    """What a package made of the model gives."""
    shapes = {name: array.shape for name, array in feeds.items()}
    plan = plan_model(model, parse_devices([devices]), Request(**{"split_mode": "layer", "shapes": shapes, **request}))
    compile_model(plan, folder, force=True)
    with Session(folder) as session:
        return session.run(feeds)


def assert_close(actual: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float = 1e-5) -> None:
    """Same names, types, shapes, and values within `tolerance` of each output's largest."""
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
    """Wait for what other threads do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def bare_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take nothing beside weights and values, so that budgets of tiny models are those of the models alone."""
    monkeypatch.setattr("splitc.compiler.planning.assembly.CPU_ENGINE", CpuEngine(*[0] * len(fields(CpuEngine))))
