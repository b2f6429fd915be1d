"""Requests without rows or tokens, which end a process where kernels on GPUs divide by their number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from splitc.runtime.errors import FeedError
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.requests.empty_outputs import EmptyOutputs
from tests.compiler.fusion.test_caches import OPTIMUM
from tests.compiler.fusion.test_preamble import HALF, compiled
from tests.helpers.needs import needs_caches
from tests.helpers.written_decoder import feeds

GPU, CPU = Device("cuda", 0), Device("cpu", 0)


@needs_caches
@pytest.mark.usefixtures("gpus")
def test_gpus_get_rows_and_tokens(tmp_path: Path) -> None:
    style = replace(OPTIMUM, dtype=HALF)
    manifest = read_manifest(compiled(style, tmp_path, "layer", ["cuda0"]))
    whole = feeds(style, 2, 4, 3)
    no_rows = {name: array[:0] for name, array in whole.items()}
    no_tokens = {**whole, "input_ids": whole["input_ids"][:, :0]}
    on_gpu = EmptyOutputs(manifest, [GPU])
    on_gpu.check(feeds(style, 2, 4, 0))
    for request in (no_rows, no_tokens):
        EmptyOutputs(manifest, [CPU]).check(request)
        with pytest.raises(FeedError, match="is 0 in the input 'input_ids', and GPUs run no requests without"):
            on_gpu.check(request)
