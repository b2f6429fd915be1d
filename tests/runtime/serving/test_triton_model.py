"""The model that Triton's Python backend loads, with a fake of the backend's library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from splitc.runtime import MisuseError, Session
from splitc.runtime.serving.serving_file import Serving, write_serving
from splitc.runtime.serving.triton_repository import export_triton
from tests.conftest import Arrays, assert_close, decoder_feeds, run_whole, until
from tests.helpers import fake_triton
from tests.helpers.adapters import random_pairs, write_kohya, write_peft
from tests.helpers.command import splitc
from tests.helpers.fake_triton import InferenceRequest, TritonError
from tests.helpers.feeds import LAYERS
from tests.helpers.workers import workers_of

START, END = fake_triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, fake_triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END


@pytest.fixture
def load(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Load the decoder's package as Triton does."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_triton)
    monkeypatch.delitem(sys.modules, "splitc.runtime.serving.triton_model", raising=False)
    from splitc.runtime.serving.triton_model import TritonPythonModel

    loaded = []

    def load(sequences: bool, source: Path = package, **serving: Any) -> Any:
        (folder,) = export_triton(source, tmp_path, Serving("package", threads=1, **serving), sequences=sequences)
        model = TritonPythonModel()
        model.initialize({"model_repository": str(folder), "model_version": "1", "model_name": folder.name})
        loaded.append(model)
        return model

    yield load
    for model in loaded:
        model.finalize()
    sys.modules.pop("splitc.runtime.serving.triton_model", None)


def without_states(feeds: Arrays) -> Arrays:
    return {name: array for name, array in feeds.items() if not name.startswith("past")}


def step(ids: list[int], total: int, key: int, marks: int = 0) -> InferenceRequest:
    """A request of a sequence that reads these tokens, the last of `total`."""
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


def test_page_of_metrics_has_the_counters(load: Callable[..., Any], decoder: Path) -> None:
    fake_triton.MetricFamily.families.clear()
    model = load(sequences=False)
    requests = [InferenceRequest(decoder_feeds(1, 1, 2 + number), ["logits"]) for number in range(3)]
    requests.append(InferenceRequest({"input_ids": np.array([[1]])}, ["logits"]))
    model.execute(requests)
    for request in requests:
        assert request.answered.wait(20)
    page = {family.name: family.metrics for family in fake_triton.MetricFamily.families}
    assert {family.kind for family in fake_triton.MetricFamily.families} == {"counter", "gauge"}
    values = {name: [metric.value for metric in metrics] for name, metrics in page.items()}
    assert values["splitc_requests_done_total"] == [3]
    assert values["splitc_requests_failed_total"] == [0], "a request that no rank got is the client's own"
    assert values["splitc_requests_in_flight"] == [0]
    assert [metric.labels["device"] for metric in page["splitc_rank_busy_seconds_total"]] == ["cpu0", "cpu1", "cpu2"]
    assert min(values["splitc_rank_busy_seconds_total"]) > 0
    assert all(metric.labels["model"] == "decoder" for metrics in page.values() for metric in metrics)


def test_sequences_of_a_model_without_them_are_refused(load: Callable[..., Any]) -> None:
    request = InferenceRequest(decoder_feeds(), ["logits"], 5, START)
    load(sequences=False).execute([request])
    with pytest.raises(TritonError, match="this model has no sequences"):
        request.result()


def test_bad_requests_fail_alone(load: Callable[..., Any], decoder: Path) -> None:
    """Requests that are refused at once, and requests on which an engine fails, in a batch with good ones."""
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
    assert open_sequences(model) == 0
    until(lambda: not any(worker.computation.sequences for worker in workers_of(model._served._session)))


def open_sequences(model: Any) -> int:
    return len(model._served._sequences._kept)


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
    until(lambda: open_sequences(model) == 0)
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
    assert open_sequences(model) == 1


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
    args = {"model_repository": str(folder.parent), "model_version": "1", "model_name": "decoder"}
    write_serving(folder, Serving("nowhere"))
    with pytest.raises(fake_triton.TritonModelException, match="nowhere does not exist"):
        type(model)().initialize(args)
    (folder / "serving.json").write_bytes(msgspec.json.encode({"package": "package", "treads": 2}))
    with pytest.raises(fake_triton.TritonModelException, match="unknown field `treads`"):
        type(model)().initialize(args)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    pairs = [
        random_pairs({f"model.layers.{n}.self_attn.q_proj": (64, 64) for n in range(LAYERS)}, 4, seed, 0.2)
        for seed in (0, 1)
    ]
    return {name: str(write_peft(folder / name, own)) for name, own in zip(("style", "pose"), pairs, strict=True)}


def test_requests_name_their_adapters(load: Callable[..., Any], slotted: Path, adapters: dict[str, str]) -> None:
    """Requests with the same sum are one batch. The files are those of the export."""
    model = load(False, slotted, adapters=adapters)
    asked = ["", "style", "style:0.5, pose", "style", "style:0.5, pose", ""]
    feeds = [decoder_feeds(1 + n % 2, 2, 3) for n in range(len(asked))]
    requests = [InferenceRequest(own, ["logits"], adapter=name) for own, name in zip(feeds, asked, strict=True)]
    model.execute(requests)
    sums: dict[str, Any] = {"": {}, "style": "style", "style:0.5, pose": {"style": 0.5, "pose": 1.0}}
    with Session(slotted) as session:
        for name, file in adapters.items():
            session.adapters.load(name, file)
        for request, own, name in zip(requests, feeds, asked, strict=True):
            assert_close(request.result(), {"logits": session.run(own, adapters=sums[name])["logits"]})
    unknown = InferenceRequest(feeds[0], ["logits"], adapter="other")
    model.execute([unknown])
    with pytest.raises(TritonError, match="no adapter 'other' is loaded: there are style, pose") as refused:
        unknown.result()
    assert refused.value.code == TritonError.INVALID_ARG


def test_adapter_may_be_the_part_of_a_file_for_one_model(
    load: Callable[..., Any], slotted: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.q_proj"
    pairs = random_pairs({name: (64, 64)}, 4)
    text = f"unet={write_kohya(tmp_path / 'style.safetensors', pairs, 4)}"
    model = load(False, slotted, adapters={"style": text})
    request = InferenceRequest(decoder_feeds(), ["logits"], adapter="style")
    model.execute([request])
    with Session(slotted) as session:
        session.adapters.load("style", text)
        assert_close(request.result(), {"logits": session.run(decoder_feeds(), adapters="style")["logits"]})
    model.finalize()


def test_sequences_keep_the_adapter_that_they_begin_with(
    load: Callable[..., Any], slotted: Path, adapters: dict[str, str]
) -> None:
    model = load(True, slotted, adapters=adapters)
    requests = [step([5 + n], n + 1, 7, START * (n == 0)) for n in range(3)]
    requests[0].adapter = requests[2].adapter = "style"
    model.execute(requests)
    with Session(slotted) as session:
        session.adapters.load("style", adapters["style"])
        with session.start(adapters="style") as sequence:
            for request in requests:
                assert_close(request.result(), {"logits": sequence.run(request.feeds)["logits"]})
    other = step([9], 4, 7)
    other.adapter = "pose"
    model.execute([other])
    with pytest.raises(TritonError, match="sequence 7 began with the adapter 'style', and keeps it: not 'pose'"):
        other.result()


def test_adapters_that_are_not_exported(slotted: Path, package: Path, adapters: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for source, own, why in (
        (package, adapters, "has no slots for adapters"),
        (slotted, {"style": str(tmp_path / "none")}, "does not exist"),
        (slotted, {"a,b": adapters["style"]}, "can't be an adapter's name"),
    ):
        with pytest.raises(MisuseError, match=why):
            export_triton(source, tmp_path / "models", Serving("package", adapters=own))
        with pytest.raises(MisuseError, match=why):
            export_triton(source, tmp_path / "new" / "models", Serving("package", adapters=own))
        assert not list((tmp_path / "models").iterdir()) and not (tmp_path / "new").exists()
    said = splitc("export", "triton", slotted, "-o", tmp_path / "bad", "--adapter", adapters["style"], code=2)
    assert "give it a name" in said.stderr
    twice = ["--adapter", f"style={adapters['style']}"] * 2
    assert "twice" in splitc("export", "triton", slotted, "-o", tmp_path / "bad", *twice, code=2).stderr
    splitc("export", "triton", slotted, "-o", tmp_path / "good", "--adapter", f"style={adapters['style']}")
    assert (tmp_path / "good" / "decoder" / "1" / "adapters" / "style" / "adapter_config.json").is_file()
