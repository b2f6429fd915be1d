from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime.hardware.devices import DeviceStatus
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.tools.routes import find_routes

# Three GPUs, of which the last has no access to the others' memory.
FOUND = [
    DeviceStatus("cuda0", "", 1, 1, peers={"cuda1": "peer", "cuda2": "host"}),
    DeviceStatus("cuda1", "", 1, 1, peers={"cuda0": "peer", "cuda2": "host"}),
    DeviceStatus("cuda2", "", 1, 1, peers={"cuda0": "host", "cuda1": "host"}),
]
HOST = "through the host's pinned memory"


@pytest.mark.parametrize(
    ("mode", "routes"),
    [
        ("layer", {"directly": ["cuda0-cuda1"], HOST: ["cuda1-cuda2"]}),
        ("tensor", {"directly": ["cuda0-cuda1"], HOST: ["cuda0-cuda2", "cuda1-cuda2"]}),
        ("row", {"directly": ["cuda0-cuda1"], HOST: ["cuda0-cuda2"]}),
    ],
)
def test_routes_are_those_of_what_ranks_exchange(
    decoder: Path, tmp_path: Path, mode: str, routes: dict[str, list[str]]
) -> None:
    request = Request(split_mode=mode, engine="onnxruntime", memory=["8GiB"], spread=True)
    request = replace(request, row_min=16) if mode == "row" else request
    compile_model(plan_model(decoder, ["3xcuda"], request), tmp_path / "package", verify=False)
    manifest = read_manifest(tmp_path / "package")
    assert find_routes(manifest, lambda: FOUND) == routes
    assert find_routes(manifest, list) == {}


def test_nobody_looks_for_gpus_that_a_package_has_not(decoder: Path, tmp_path: Path) -> None:
    compile_model(
        plan_model(decoder, ["3xcpu"], Request(split_mode="layer", spread=True)), tmp_path / "package", verify=False
    )

    def look() -> list[DeviceStatus]:
        raise AssertionError

    assert find_routes(read_manifest(tmp_path / "package"), look) == {}


def test_a_rank_that_takes_nothing_exchanges_nothing(write_model: Callable[[str], Path], tmp_path: Path) -> None:
    constant = write_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        fixed () => (float[4] y) <float[4] w = {1, 2, 3, 4}> { y = Relu (w) }
    """)
    compile_model(plan_model(constant, ["cpu0"]), tmp_path / "package", verify=False)
    assert find_routes(read_manifest(tmp_path / "package"), list) == {}
