"""The modules' total memory on each device is the same in the plan, its page, and the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from models.writer import save
from splitc.compiler import Request, compile_pipeline, plan_pipeline
from splitc.compiler.show.pipeline_page import pipeline_page
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.reports.contents import Page
from splitc.runtime.reports.package_pages import inspect_page
from splitc.runtime.tools.module_sums import sum_modules
from splitc.runtime.units import format_bytes
from tests.helpers.command import splitc
from tests.helpers.folders import text_encoder, write_json

NAMES = ("text_encoder", "text_encoder_2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two encoders, each with an embedding of 5 MB, of which few rows are read, and with layers that take adapters."""
    folder = tmp_path_factory.mktemp("encoders")
    for layers, name in enumerate(NAMES, start=2):
        save(text_encoder(layers, words=40_000).model(), folder / name / "model.onnx")
    write_json(folder / "model_index.json", {"_class_name": "StableDiffusionPipeline"})
    return folder


def cells(page: Page) -> dict[str, str]:
    """The numbers of the first device in the table of all modules."""
    (table,) = page.chapters[0].sections[0].tables
    return dict(zip(table.columns, table.rows[0], strict=True))


@pytest.mark.parametrize("slots", [None, 4])
def test_sums_of_the_plan_and_of_the_package_agree(folder: Path, tmp_path: Path, slots: int | None) -> None:
    plan = plan_pipeline(folder, ["cpu0"], Request(lora_slots=slots))
    (device,) = plan.devices
    memory = [rank.memory for module in plan.modules for rank in module.plan.ranks]
    adapters = sum(own.adapters for own in memory)
    assert device.adapters == adapters and (adapters > 0) == (slots is not None)
    assert device.mapped == sum(own.in_files for own in memory) > 8_000_000, "of both modules"
    assert device.total < sum(own.total for own in memory) < 1 << 27
    compile_pipeline(plan, tmp_path / "package")
    manifests = {name: read_manifest(tmp_path / "package" / name) for name in NAMES}
    held = sum_modules(manifests)["cpu0"]
    assert (held.total, held.adapters, held.mapped) == (device.total, device.adapters, device.mapped)
    pages = [cells(pipeline_page(plan)), cells(inspect_page("package", manifests))]
    for term in ("weights", "peak", *(["adapters"] if slots else [])):
        assert pages[0][term] == pages[1][term], term
    assert pages[0]["weights"] == format_bytes(device.weights - device.mapped)
    assert pages[0].get("adapters") == (format_bytes(adapters) if slots else None)


def test_terminal_says_what_is_beside_the_table(folder: Path) -> None:
    said = splitc("plan", folder, "-d", "cpu0", "--lora-slots", 4).stdout
    for beside in ("for the engine itself", "for requests with adapters", "of weights, read from mapped"):
        assert len(re.findall(beside, said)) == 1
