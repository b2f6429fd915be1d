"""The table of engine kinds."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import pytest

from splitc.runtime.engines.kind import BackendOptions, EngineKind
from splitc.runtime.engines.kinds import KINDS, choose_engine, describe_engine, find_kind, has_collectives, make_backend
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import Device, parse_devices
from splitc.runtime.package.manifest import BuildOptions


class ImaginaryBackend:
    """Keeps what it was made from."""

    def __init__(self, options: BackendOptions) -> None:
        self.options = options

    create = classmethod(lambda cls, options: cls(options))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_backends_of_a_kind_are_there(kind: EngineKind) -> None:
    for entry in kind.backends.values():
        assert callable(resolve_name(entry).create)


def test_kind_that_is_in_the_table_is_loaded_and_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other module lists the kinds."""
    new = EngineKind(
        name="imaginary",
        title="Imaginary",
        on_gpus="imaginary",
        module="json",
        package="imaginary-engines",
        backends={"cpu": f"{__name__}:ImaginaryBackend"},
        builder="imaginary",
        priority=2,
    )
    monkeypatch.setitem(KINDS, "imaginary", new)
    assert choose_engine(None, parse_devices(["2xcpu"])) == "imaginary"
    assert choose_engine("imaginary", parse_devices(["cpu0"])) == "imaginary"
    backend: Any = make_backend("imaginary", Device("cpu", 1), 3)
    assert backend.options == BackendOptions(new, Device("cpu", 1), 3, BuildOptions(), True)
    with pytest.raises(MisuseError, match="Imaginary runs on GPUs"):
        choose_engine("imaginary", parse_devices(["cuda0"]))


@pytest.mark.parametrize(
    ("version", "inside"), [("10.15.1", False), ("10.16", True), ("10.16.0.3", True), ("11.0.1", True), (None, False)]
)
def test_collectives_came_with_a_version(version: str | None, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineKind, "is_installed", version is not None)
    monkeypatch.setattr(EngineKind, "version", version)
    gpus = parse_devices(["2xcuda"])
    found = {name: has_collectives(name, gpus) for name in KINDS if name != "onnxruntime"}
    assert found == {"tensorrt": inside, "tensorrt-rtx": True}


@pytest.mark.parametrize("is_built", [True, False])
def test_operators_are_for_all_devices_with_the_library(is_built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.engines.operator_library.is_built", lambda: is_built)
    for names in (["3xcpu"], ["2xcuda"], ["cuda0", "cuda0"], ["cuda0", "cpu0"]):
        assert has_collectives("onnxruntime", parse_devices(names)) == is_built


@pytest.mark.parametrize("installed", [True, False])
def test_gpus_get_tensorrt_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    here: Mapping[str, bool] = {"onnxruntime": True, "tensorrt": installed, "tensorrt-rtx": True}
    monkeypatch.setattr(EngineKind, "is_installed", property(lambda kind: here[kind.name]))
    assert choose_engine(None, parse_devices(["2xcuda"])) == ("tensorrt" if installed else "onnxruntime")
    assert choose_engine(None, parse_devices(["cuda0", "cpu0"])) == "onnxruntime"
    why = "" if installed else " (TensorRT is not installed)"
    assert describe_engine("onnxruntime") == f"ONNX Runtime's CUDA provider{why}"
    assert describe_engine("tensorrt-rtx") == "tensorrt-rtx"


def test_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(MisuseError, match="unknown engine 'openvino': there are onnxruntime, tensorrt, tensorrt-rtx"):
        find_kind("openvino")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineKind, "is_installed", False)
    with pytest.raises(MisuseError, match=r"tensorrt-rtx is not installed: pip install tensorrt-rtx-cu13"):
        find_kind("tensorrt-rtx").need_installed()
