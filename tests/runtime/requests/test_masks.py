"""Masks of sequences whose caches have room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models import llama_fused
from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import MisuseError
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.requests import sequence as sequences
from tests.conftest import DECODER, LAYER, decoder_feeds, run_whole

ROOM = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fused")
    save(llama_fused.build(DECODER), folder / "model.onnx")
    compile_model(plan_model(folder / "model.onnx", ["cpu0"], LAYER), folder / "package")
    return folder


def steps(rows: int, tokens: list[int]) -> list[dict[str, Any]]:
    """Feeds of this number of tokens each, with masks of all tokens so far."""
    ids = np.arange(rows * sum(tokens)).reshape(rows, -1) % DECODER.vocabulary
    ends = np.cumsum(tokens)
    return [
        {"input_ids": ids[:, end - new : end], "attention_mask": np.ones((rows, end), np.int64)}
        for new, end in zip(tokens, ends, strict=True)
    ]


@pytest.mark.parametrize(("rows", "tokens"), [(1, [3, 1, 1, 2]), (2, [3, 1, 1])])
def test_requests_of_a_sequence_keep_their_sizes(
    rows: int, tokens: list[int], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = list[int]()

    def recorded(feeds: Any, *others: Any, **more: Any) -> InFlightRequest:
        lengths.append(feeds["attention_mask"].shape[1])
        return InFlightRequest(feeds, *others, **more)

    monkeypatch.setattr(sequences, "InFlightRequest", recorded)
    caches = {name: array for name, array in decoder_feeds(rows, 1, 0).items() if name.startswith("past")}
    with Session(model / "package", threads=1) as session, session.start(capacity=ROOM) as sequence:
        for feeds in steps(rows, tokens):
            expected = run_whole(model / "model.onnx", {**feeds, **caches})
            given = sequence.run(feeds)
            np.testing.assert_allclose(given["logits"], expected["logits"], rtol=0, atol=1e-5)
            caches = {name: expected[name.replace("past_key_values", "present")] for name in caches}
    # Several rows of a prompt are read as they are: kernels take them for nothing but a prompt.
    assert lengths == [3 if rows > 1 else ROOM, *[ROOM] * (len(tokens) - 1)]


def test_states_beyond_the_capacity_are_refused(model: Path) -> None:
    caches = {name: array for name, array in decoder_feeds(1, 1, ROOM + 1).items() if name.startswith("past")}
    refused = pytest.raises(MisuseError, match=f"the states have {ROOM + 1} tokens, and .* has room for {ROOM}")
    with Session(model / "package", threads=1) as session, session.start(capacity=ROOM) as sequence, refused:
        sequence.load(caches)


def with_average(reads_mask: bool, folder: Path) -> Path:
    """The decoder with a state of one size: the average of its tokens. With `reads_mask`, of those that this shows."""
    model = llama_fused.build(DECODER)
    save(model, folder / "plain.onnx")
    proto = onnx.load(folder / "plain.onnx")
    parts = """
        tokens = Cast <to = 1> (input_ids)
        new = ReduceMean <axes = [1]> (tokens)
        old = Mul (average, half)
        """
    last = "start = Constant <value_ints = [-1]> () end = Constant <value_ints = [9999]> ()"
    last += " axis = Constant <value_ints = [1]> () shown = Slice (attention_mask, start, end, axis)"
    last += " kept = Cast <to = 1> (shown) change = Mul (new, kept)"
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (int64[rows, new_tokens] input_ids, int64[rows, all_tokens] attention_mask, float[rows, 1] average)
        => (float[rows, 1] next) <float half = {{0.5}}>
        {{ {parts} {last if reads_mask else "change = Identity (new)"} next = Add (old, change) }}"""
    graph, own = proto.graph, onnx.parser.parse_model(text).graph
    graph.node.extend(own.node)
    graph.initializer.extend(own.initializer)
    graph.input.append(own.input[2])
    graph.output.append(own.output[0])
    onnx.save(proto, folder / "model.onnx")
    request = Request(split_mode="layer", states={"average": "next"})
    compile_model(plan_model(folder / "model.onnx", ["cpu0"], request), folder / "package", verify=False)
    return folder


@pytest.mark.parametrize("reads_mask", [False, True])
def test_masks_keep_their_sizes_beside_states_of_one_size_if_tokens_are_counted(
    reads_mask: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = list[int]()

    def recorded(feeds: Any, *others: Any, **more: Any) -> InFlightRequest:
        lengths.append(feeds["attention_mask"].shape[1])
        return InFlightRequest(feeds, *others, **more)

    monkeypatch.setattr(sequences, "InFlightRequest", recorded)
    folder = with_average(reads_mask, tmp_path)
    held: dict[str, Any] = {n: a for n, a in decoder_feeds(1, 1, 0).items() if n.startswith("past")}
    held["average"] = np.zeros((1, 1), np.float32)
    with Session(folder / "package", threads=1) as session, session.start(capacity=ROOM) as sequence:
        for feeds in steps(1, [3, 1, 2]):
            expected = run_whole(folder / "model.onnx", {**feeds, **held})
            given = sequence.run(feeds)
            np.testing.assert_allclose(given["logits"], expected["logits"], rtol=0, atol=1e-5)
            held = {n: expected[n.replace("past_key_values", "present")] for n in held if n != "average"}
            held["average"] = expected["next"]
    assert lengths == ([3, 4, 6] if reads_mask else [ROOM] * 3)
