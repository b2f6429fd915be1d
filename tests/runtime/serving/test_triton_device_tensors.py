"""Tensors that Triton has on a GPU, for ranks in its process, with fakes for Triton's library and GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime.serving.serving_file import Serving
from splitc.runtime.serving.triton_repository import export_triton
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers import fake_triton
from tests.helpers.fake_gpu_arrays import GpuNdarray, asarray
from tests.helpers.fake_gpu_sessions import gpus, package
from tests.helpers.fake_triton import InferenceRequest

__all__ = ["gpus"]
ON_GPUS = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'


@pytest.fixture
def load(
    gpus: None, decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Any, str]]]:
    """Load the decoder's package as Triton does, and its config."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_triton)
    monkeypatch.delitem(sys.modules, "splitc.runtime.serving.triton_model", raising=False)
    from splitc.runtime.serving.triton_model import TritonPythonModel

    loaded = []

    def load(devices: list[str]) -> tuple[Any, str]:
        serving = Serving("package", threads=1, devices=devices)
        (folder,) = export_triton(package(decoder, "layer", len(devices)), tmp_path, serving, sequences=False)
        model = TritonPythonModel()
        model.initialize({"model_repository": str(folder), "model_version": "1", "model_name": folder.name})
        loaded.append(model)
        return model, (folder / "config.pbtxt").read_text()

    yield load
    for model in loaded:
        model.finalize()
    sys.modules.pop("splitc.runtime.serving.triton_model", None)


def ask(model: Any, feeds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    requests = [InferenceRequest(each, ["logits", "present.1.key"]) for each in feeds]
    model.execute(requests)
    return [request.result() for request in requests]


def test_outputs_are_where_inputs_are(
    load: Callable[..., tuple[Any, str]], decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with inputs on a GPU are batched separately, and get their outputs there."""
    model, config = load(["cuda1"])
    assert ON_GPUS in config
    session, runs = model._served._session, []
    known = session.run

    def run(feeds: dict[str, Any], on_device: bool, **options: Any) -> Any:
        runs.append(on_device)
        return known(feeds, on_device=on_device)

    monkeypatch.setattr(session, "run", run)
    asked = [decoder_feeds(1 + n % 2, 2, 3) for n in range(4)]
    on_gpu = [{name: asarray(array) for name, array in feeds.items()} for feeds in asked]
    found = ask(model, [*asked, *on_gpu])
    assert sorted(runs) == [False, True], "two batches"
    for feeds, on_host, outputs in zip(asked, found[:4], found[4:]):
        whole = run_whole(decoder, feeds)
        expected = {name: whole[name] for name in ("logits", "present.1.key")}
        assert all(isinstance(array, np.ndarray) for array in on_host.values())
        assert all(isinstance(array, GpuNdarray) for array in outputs.values())
        assert_close(on_host, expected)
        assert_close({name: array.get() for name, array in outputs.items()}, expected)


def test_ranks_without_gpus_take_the_host_s(load: Callable[..., tuple[Any, str]], decoder: Path) -> None:
    """If an edited config gives them an input on a GPU, it is copied."""
    model, config = load(["cpu0", "cpu1"])
    assert ON_GPUS not in config
    feeds = decoder_feeds()
    (outputs,) = ask(model, [{name: asarray(array) for name, array in feeds.items()}])
    whole = run_whole(decoder, feeds)
    assert_close(outputs, {name: whole[name] for name in ("logits", "present.1.key")})


def test_processes_of_their_own_take_the_host_s(decoder: Path, tmp_path: Path) -> None:
    serving = Serving("package", devices=["2xcuda"])
    (folder,) = export_triton(package(decoder, "layer", 2), tmp_path, serving, sequences=False)
    assert ON_GPUS not in (folder / "config.pbtxt").read_text()
