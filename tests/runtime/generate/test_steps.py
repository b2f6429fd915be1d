"""Each step of generated text is the unsplit model's: of whole prompts, of chunks, and of padded rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from models.llama import Size
from models.llama_fused import build as build_fused
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.generate.tokens import generate
from tests.helpers.packages import compile_mode
from tests.helpers.steps import Recorder, Unsplit, compare_steps, run_rows
from tests.helpers.written_decoder import Style, write

SMALL = Size(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=48, vocabulary=40)
PROMPT = [5, 9, 2, 7, 3]


def written(style: Style) -> Callable[[Path], None]:
    return lambda path: onnx.save(write(style), path)


DECODERS: dict[str, Callable[[Path], None]] = {
    "operators of ONNX Runtime": lambda path: save(build_fused(SMALL), path),
    "a window": written(Style(window=3)),
    "sinks": written(Style(sinks=True)),
    "attention of ONNX": written(Style(operator="past", opset=23)),
    "one token": written(Style(one=True)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_steps_are_those_of_the_unsplit_model(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    DECODERS[name](model)
    compile_model(plan_model(model, ["cpu0"], Request()), tmp_path / "package", verify=False)
    # ONNX Runtime's operator reads no several tokens in several rows behind earlier ones.
    check(tmp_path / "package", model, (4, 1, 1) if name == "operators of ONNX Runtime" else (4, 3, 1))


@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_steps_of_several_ranks(decoder: Path, mode: str) -> None:
    check(compile_mode(decoder, mode), decoder, (4, 3, 1))


def check(package: Path, model: Path, rows: Sequence[int]) -> None:
    with Session(package, threads=1, verify="never") as session:
        recorder, unsplit = Recorder(session), Unsplit(model, session.manifest)
        for chunk in (5, 2):
            assert len(list(generate(recorder, PROMPT, max_new_tokens=3, prompt_chunk=chunk))) == 3
        if unsplit.takes_many:
            run_rows(recorder, 2, rows, padded=2)
        steps = [len(steps) for steps in recorder.sequences]
        differences = compare_steps(recorder.sequences, unsplit)
    assert steps == ([3, 5, 3] if unsplit.takes_many else [7, 7])
    assert len(differences) == sum(steps)
    assert all(difference.passed for difference in differences), differences


def test_a_step_that_differs_is_told(decoder: Path) -> None:
    with Session(compile_mode(decoder, "one device"), threads=1) as session:
        recorder, unsplit = Recorder(session), Unsplit(decoder, session.manifest)
        list(generate(recorder, PROMPT, max_new_tokens=3))
        recorder.sequences[0][1].outputs["logits"][0, 0, 7] += 1e-2
        wrong = [difference for difference in compare_steps(recorder.sequences, unsplit) if not difference.passed]
    assert [difference.name for difference in wrong] == ["logits of step 1"]
    assert np.isclose(wrong[0].absolute, 1e-2, rtol=1e-2)
