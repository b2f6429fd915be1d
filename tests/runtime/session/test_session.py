from __future__ import annotations

import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime import FeedError, MisuseError, PackageError, Session, SplitcError
from splitc.runtime.feeds.rows import cut_batches, join_batches
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import assert_close, decoder_feeds, run_whole


def test_states_that_are_not_fed_begin_empty(decoder: Path, package: Path) -> None:
    feeds = decoder_feeds(2, 5, 0)
    with Session(package) as session:
        states = [state.input for state in session.manifest.states]
        fed = {name: array for name, array in feeds.items() if name not in states}
        assert len(fed) == len(feeds) - len(states) > 0
        expected = run_whole(decoder, feeds)
        assert_close(session.run(fed), expected)
        assert_close(session.submit(fed).result(), expected)
        assert_close(session.run(fed, micro_batch=1), expected)
        with pytest.raises(FeedError, match=f"no array for the inputs? .*{states[1]}"):
            session.run({**fed, states[0]: feeds[states[0]]})


def test_a_session_shows_what_it_takes(package: Path) -> None:
    with Session(package) as session:
        assert repr(session) == "<Session of decoder: decoder.onnx, layer mode on cpu0, cpu1, cpu2>"
        assert repr(session.manifest) == "<Manifest of decoder.onnx: layer mode, 3 ranks, onnxruntime engines>"
        lines = str(session).splitlines()
        assert [line.split()[:3] for line in lines[2:4]] == [
            ["input", tensor.name, tensor.dtype] for tensor in session.inputs[:2]
        ]
        assert len(lines) == 2 + len(session.inputs) + len(session.optional) + len(session.outputs)
        assert session._repr_html_().count("<tr>") == len(lines) - 1


@pytest.mark.parametrize(("batch", "new", "past"), [(1, 1, 0), (3, 17, 2), (1, 4, 40)])
def test_package_stays_dynamic(decoder: Path, package: Path, batch: int, new: int, past: int) -> None:
    feeds = decoder_feeds(batch, new, past)
    with Session(package) as session:
        assert_close(session.run(feeds), run_whole(decoder, feeds))


def test_runs_do_not_disturb_each_other(package: Path, request: pytest.FixtureRequest) -> None:
    """Callers on several threads each get their own answer."""
    questions = [decoder_feeds(1, new) for new in range(1, 9)]
    # Threads change over at almost any instruction, also between handing a request to one rank and to the next.
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    sys.setswitchinterval(1e-6)
    with Session(package) as session:
        alone = [session.run(feeds) for feeds in questions]
        with ThreadPoolExecutor(len(questions)) as pool:
            answers = list(pool.map(session.run, questions * 15))
    for number, answer in enumerate(answers):
        assert_close(answer, alone[number % len(questions)], 0)


def test_feeds_may_be_lists_and_views(package: Path) -> None:
    feeds = decoder_feeds(1, 4)
    with Session(package) as session:
        expected = session.run(feeds)
        wide = np.zeros((1, 8), np.int64)
        wide[:, ::2] = feeds["input_ids"]
        feeds["input_ids"] = wide[:, ::2]
        assert_close(session.run(feeds), expected, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "no array for the input input_ids"),
        ({"extra": np.zeros(1)}, "the model has no input extra; it takes input_ids"),
        ({"input_ids": np.zeros((2, 3), np.int32)}, "'input_ids' is int32, and the model takes int64"),
        ({"input_ids": np.zeros(3, np.int64)}, "has shape 3, and the model takes batch x sequence"),
        (
            {"past_key_values.0.key": np.zeros((2, 9, 5, 16), np.float32)},
            "has shape 2 x 9 x 5 x 16, and the model takes",
        ),
    ],
)
def test_wrong_feeds_are_named(package: Path, change: dict[str, np.ndarray | None], message: str) -> None:
    feeds = {name: array for name, array in {**decoder_feeds(), **change}.items() if array is not None}
    with Session(package) as session, pytest.raises(FeedError, match=message):
        session.run(feeds)


def test_closed_session_refuses(package: Path) -> None:
    before = threading.active_count()
    session = Session(package)
    assert threading.active_count() == before + 3
    session.close()
    session.close()
    assert threading.active_count() == before
    for use in (lambda: session.run(decoder_feeds()), session.start):
        with pytest.raises(SplitcError, match="closed"):
            use()


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    shutil.copytree(package, tmp_path / "copy")
    return tmp_path / "copy"


def test_changed_file_is_found_by_its_hash(copy: Path) -> None:
    file = copy / "rank1" / "stage1.weights"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(PackageError, match=r"stage1\.weights was changed"):
        Session(copy)
    Session(copy, verify="never").close()


def test_file_cut_short_is_found(copy: Path) -> None:
    file = copy / "rank2" / "stage2.weights"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(PackageError, match=f"has {size - 1:,} bytes, its manifest says {size:,}"):
        Session(copy)


def test_missing_file_is_found(copy: Path) -> None:
    (copy / "rank0" / "stage0.onnx").unlink()
    with pytest.raises(PackageError, match=r"stage0\.onnx is missing"):
        Session(copy)


def test_engine_that_cannot_be_loaded_is_named(copy: Path) -> None:
    (copy / "rank0" / "stage0.onnx").write_bytes(b"no engine")
    with pytest.raises(PackageError, match=r"ONNX Runtime can't load .*stage0.onnx"):
        Session(copy, verify="never")


def test_newer_schema_is_named(copy: Path) -> None:
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": 4', '"schema": 99', 1))
    with pytest.raises(PackageError, match="schema version 99, and this splitc reads versions 3 and 4: upgrade"):
        Session(copy)


def test_damaged_manifest_is_named(copy: Path) -> None:
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text()[:-100])
    with pytest.raises(PackageError, match=r"manifest.json is damaged"):
        Session(copy)
    manifest.write_text('{"schema": 3}')
    with pytest.raises(PackageError, match=r"manifest.json is damaged"):
        Session(copy)


@pytest.mark.parametrize(("name", "message"), [("none", "does not exist"), (".", "has no manifest.json")])
def test_what_is_no_package_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(PackageError, match=message):
        read_manifest(tmp_path / name)


@pytest.mark.parametrize("in_flight", [-1, 0, 1.5, 10**6, "x"])
def test_in_flight_is_a_number_of_requests(package: Path, in_flight: Any) -> None:
    with pytest.raises(MisuseError, match="it is a number from 1 to 10,000"):
        Session(package, in_flight=in_flight)
    with pytest.raises(MisuseError, match="it is a number for each CPU device from 1 to 1,024"):
        Session(package, threads=0)


def test_numbers_may_be_numpys(package: Path) -> None:
    with Session(package, in_flight=np.int64(3)) as session:  # type: ignore[arg-type]
        assert session.in_flight == 3
        tokens = session.generate([1, 2], max_new_tokens=np.int64(2), prompt_chunk=np.int32(1))
        assert len(list(tokens)) == 2
        with pytest.raises(MisuseError, match="it is a number from 1 on"):
            session.map([], in_flight=0)


def test_an_empty_batch_is_one_micro_batch() -> None:
    (piece,) = cut_batches({"x": np.ones((0, 3), "f4"), "y": np.ones(2)}, {"x": 0}, 2)
    assert (piece["x"].shape, piece["y"].shape) == ((0, 3), (2,))
    joined = join_batches([{"z": np.ones((4, 0))}], {"z": 1})
    assert joined["z"].shape == (4, 0)
