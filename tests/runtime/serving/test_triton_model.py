"""The model that Triton's Python backend loads, with a stand-in for the backend's own library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from splitc.runtime.serving.serving_file import Serving, write_serving
from splitc.runtime.serving.triton_repository import export_triton
from tests.conftest import Arrays, assert_close, decoder_feeds, run_whole, until
from tests.helpers import fake_triton
from tests.helpers.fake_triton import InferenceRequest, TritonError
from tests.helpers.workers import workers_of

START, END = fake_triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, fake_triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END


@pytest.fixture
def load(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Load the decoder's package as Triton does."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_triton)
    monkeypatch.delitem(sys.modules, "splitc.runtime.serving.triton_model", raising=False)
    from splitc.runtime.serving.triton_model import TritonPythonModel

    loaded = []

    def load(sequences: bool, **serving: Any) -> Any:
        (folder,) = export_triton(package, tmp_path, Serving("package", threads=1, **serving), sequences=sequences)
        model = TritonPythonModel()
        model.initialize({"model_repository": str(folder), "model_version": "1"})
        loaded.append(model)
        return model

    yield load
    for model in loaded:
        model.finalize()
    sys.modules.pop("splitc.runtime.serving.triton_model", None)


def without_states(feeds: Arrays) -> Arrays:
    return {name: array for name, array in feeds.items() if not name.startswith("past")}


def step(ids: list[int], total: int, key: int, marks: int = 0) -> InferenceRequest:
    """A request of a sequence that reads these tokens, the last ones of `total`."""
    feeds: Arrays = {
        "input_ids": np.array([ids]),
        "attention_mask": np.ones((1, total), np.int64),
        "position_ids": np.arange(total - len(ids), total)[None],
    }
    return InferenceRequest(feeds, ["logits"], key, marks)


def test_requests_run_together_and_are_answered_each(
    load: Callable[..., Any], decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [decoder_feeds(1 + n % 3, 2, n % 2) for n in range(6)]
    requests = [InferenceRequest(feeds, ["logits", "present.1.key"]) for feeds in asked]
    model = load(sequences=False)
    session, runs = model._served._session, []
    known = session.run

    def run(feeds: Arrays, **options: Any) -> Any:
        runs.append(len(feeds["input_ids"]))
        return known(feeds, **options)

    monkeypatch.setattr(session, "run", run)
    model.execute(requests)
    for feeds, request in zip(asked, requests):
        whole = run_whole(decoder, feeds)
        assert_close(request.result(), {name: whole[name] for name in ("logits", "present.1.key")})
    assert sorted(runs) == [6, 6], "those of one past are one batch"


def test_sequences_of_a_model_without_them_are_refused(load: Callable[..., Any]) -> None:
    request = InferenceRequest(decoder_feeds(), ["logits"], 5, START)
    load(sequences=False).execute([request])
    with pytest.raises(TritonError, match="this model has no sequences"):
        request.result()


def test_bad_requests_fail_alone(load: Callable[..., Any], decoder: Path) -> None:
    """Those that are refused at once, and those that an engine can't run, in a batch with good ones."""
    good = decoder_feeds(1, 2, 3)
    missing = {name: array for name, array in good.items() if name != "attention_mask"}
    unknown = {**good, "input_ids": good["input_ids"] + 5000}
    requests = [InferenceRequest(feeds, ["logits"]) for feeds in (good, missing, unknown, good)]
    load(sequences=False).execute(requests)
    expected = {"logits": run_whole(decoder, good)["logits"]}
    for number in (0, 3):
        assert_close(requests[number].result(), expected)
    with pytest.raises(TritonError, match="no array for the input attention_mask") as refused:
        requests[1].result()
    assert refused.value.code == TritonError.INVALID_ARG
    with pytest.raises(TritonError, match="out of") as failed:
        requests[2].result()
    assert failed.value.code == TritonError.INTERNAL


def test_sequences_keep_their_states(load: Callable[..., Any], decoder: Path) -> None:
    """Also when all their requests come at once."""
    tokens = [5, 17, 33, 2, 90]
    requests = [
        step(tokens[number : number + 1], number + 1, key, START * (number == 0) | END * (number == 4))
        for number in range(5)
        for key in (8, 9)
    ]
    model = load(sequences=True)
    model.execute(requests)
    whole = decoder_feeds(1, 5, 0)
    whole.update(without_states(dict(step(tokens, 5, 0).feeds)))
    expected = run_whole(decoder, whole)["logits"][:, -1:]
    for request in requests[-2:]:
        assert_close(request.result(), {"logits": expected}, 2e-5)
    assert model._served.open_sequences == 0
    until(lambda: not any(worker.computation.sequences for worker in workers_of(model._served._session)))


def test_sequence_that_has_not_begun_is_refused(load: Callable[..., Any]) -> None:
    request = step([1], 1, 5)
    load(sequences=True).execute([request])
    with pytest.raises(TritonError, match="sequence 5 is not open: mark its first request"):
        request.result()


def test_abandoned_sequences_are_freed(load: Callable[..., Any]) -> None:
    model = load(sequences=True, idle_seconds=0.2)
    first, again = step([1, 2], 2, 5, START), step([3], 3, 5)
    model.execute([first])
    first.result()
    until(lambda: model._served.open_sequences == 0)
    until(lambda: not any(worker.computation.sequences for worker in workers_of(model._served._session)))
    model.execute([again])
    with pytest.raises(TritonError, match=r"after 0\.2 s without a request"):
        again.result()


def test_sequence_may_start_again(load: Callable[..., Any]) -> None:
    model = load(sequences=True)
    answers = []
    for _ in range(2):
        request = step([1, 2], 2, 5, START)
        model.execute([request])
        answers.append(request.result())
    assert_close(answers[1], answers[0])
    assert model._served.open_sequences == 1


def test_sequence_goes_on_after_wrong_feeds_and_ends_with_a_failure(load: Callable[..., Any]) -> None:
    model = load(sequences=True)
    wrong = InferenceRequest({"input_ids": np.array([[1]])}, ["logits"], 5)
    requests = [step([1, 2], 2, 5, START), wrong, step([3], 3, 5), step([5000], 4, 5), step([4], 4, 5)]
    for request in requests:
        model.execute([request])
        request.answered.wait(20)
    assert requests[2].result()
    for number, said in ((1, "no array for the inputs"), (3, "out of"), (4, "sequence 5 is not open")):
        with pytest.raises(TritonError, match=said):
            requests[number].result()


def test_broken_session_is_opened_again(load: Callable[..., Any], decoder: Path) -> None:
    model = load(sequences=False)
    feeds = decoder_feeds()
    session = model._served._session
    session._admission.fail(RuntimeError("a rank died"))
    request = InferenceRequest(feeds, ["logits"])
    model.execute([request])
    assert_close(request.result(), {"logits": run_whole(decoder, feeds)["logits"]})
    assert model._served._session is not session


def test_wrong_settings_are_named(load: Callable[..., Any], tmp_path: Path) -> None:
    model = load(sequences=True)
    folder = next(tmp_path.glob("*/1"))
    args = {"model_repository": str(folder.parent), "model_version": "1"}
    write_serving(folder, Serving("nowhere"))
    with pytest.raises(fake_triton.TritonModelException, match="nowhere does not exist"):
        type(model)().initialize(args)
    (folder / "serving.json").write_bytes(msgspec.json.encode({"package": "package", "treads": 2}))
    with pytest.raises(fake_triton.TritonModelException, match="unknown field `treads`"):
        type(model)().initialize(args)
