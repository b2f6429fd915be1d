"""onnxruntime-genai, from pip, generates with packages. `make test-serving` runs this."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from models.llama_fused import build as build_fused
from models.writer import save
from splitc.compiler import compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.serving.genai_folder import export_genai
from tests.conftest import DECODER, LAYER
from tests.helpers.genai_loop import generate, open_model
from tests.helpers.greedy import plain_loop

pytestmark = pytest.mark.skipif(find_spec("onnxruntime_genai") is None, reason="needs onnxruntime-genai")

PROMPT, COUNT = [5, 17, 33, 2, 90, 41, 8], 24


def test_tokens_are_those_of_the_unsplit_model(decoder: Path, tmp_path: Path) -> None:
    expected = plain_loop(decoder, PROMPT, COUNT)
    unused = next(token for token in range(DECODER.vocabulary) if token not in expected)
    compile_model(plan_model(decoder, ["3xcpu"], replace(LAYER, no_fuse=True)), tmp_path / "package")
    export_genai(tmp_path / "package", tmp_path / "genai", stop=[unused])
    assert generate(open_model(tmp_path / "genai"), PROMPT, COUNT)[0] == expected


def test_fused_decoders_are_generated_with_too(tmp_path: Path) -> None:
    save(build_fused(DECODER), tmp_path / "fused.onnx")
    compile_model(plan_model(tmp_path / "fused.onnx", ["2xcpu"], LAYER), tmp_path / "package")
    with Session(tmp_path / "package") as session:
        expected = list(session.generate(PROMPT, max_new_tokens=COUNT))
    unused = next(token for token in range(DECODER.vocabulary) if token not in expected)
    export_genai(tmp_path / "package", tmp_path / "genai", stop=[unused])
    assert generate(open_model(tmp_path / "genai"), PROMPT, COUNT)[0] == expected
