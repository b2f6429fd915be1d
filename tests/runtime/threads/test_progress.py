"""Progress reports of long work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.progress import Progress

from splitc.compiler import plan_model
from splitc.runtime import Session
from splitc.runtime.arrays.files import save_arrays
from splitc.runtime.cli import bars, terminal
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.verification import verify_files
from splitc.runtime.serving.serving_file import Serving
from splitc.runtime.serving.triton_repository import export_triton
from splitc.runtime.threads.progress import Bytes, counted, counting, listening
from splitc.runtime.tools.bench import bench
from tests.conftest import decoder_feeds
from tests.helpers.command import splitc

# What loading a package counts.
LOADING = ("comparing hashes", "loading ranks")
# What compiling a model counts that is compared with the unsplit one.
COMPILING = {"analyzing the model", "planning candidates", "writing weights", "checking the package", "loading ranks"}
Heard = list[tuple[str, float, int]]


def test_listener_hears_of_each_item() -> None:
    heard: Heard = []
    with listening(lambda *each: heard.append(each)):
        assert list(counted("letters", "ab")) == ["a", "b"]
    assert heard == [("letters", 0, 2), ("letters", 1, 2), ("letters", 2, 2)]
    assert list(counted("letters", "ab")) == ["a", "b"], "nobody need listen"
    assert len(heard) == 3


def test_long_work_is_counted(new_decoder: Path, package: Path) -> None:
    heard: Heard = []
    with listening(lambda *each: heard.append(each)):
        plan = plan_model(new_decoder, ["cpu0", "cpu1"])
        with Session(package, threads=1) as session:
            bench(session, decoder_feeds(), runs=3, warmup=1)
    assert ("planning candidates", len(plan.alternatives), len(plan.alternatives)) in heard
    assert ("timing", 3, 3) in heard
    assert ("loading ranks", 3, 3) in heard
    assert ("analyzing the model", 5, 5) in heard


def test_work_of_other_threads_is_counted_together() -> None:
    heard: Heard = []
    with listening(lambda *each: heard.append(each)):
        add = counting("bytes", Bytes(8))
        counting("nothing", Bytes(0))  # of which nobody hears
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, [2] * 4))
    assert heard == [("bytes", done, 8) for done in (0, 2, 4, 6, 8)]
    assert all(isinstance(total, Bytes) for _, _, total in heard)


def test_comparing_hashes_is_counted_in_bytes(package: Path) -> None:
    heard: Heard = []
    with listening(lambda *each: heard.append(each)):
        verify_files(package, read_manifest(package).files, "always")
    whole = sum(file.bytes for file in read_manifest(package).files if file.hash is not None)
    assert heard[-1] == ("comparing hashes", whole, whole)


def test_export_counts_the_files_that_it_writes(package: Path, tmp_path: Path) -> None:
    heard: Heard = []
    with listening(lambda *each: heard.append(each)):
        export_triton(package, tmp_path / "repository", Serving("package"))
    assert [what for what, done, total in heard if what == "writing files" and done == total]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["plan", "MODEL", "-d", "2xcpu"], {"analyzing the model", "planning candidates"}),
        (["compile", "MODEL", "-o", "OUTPUT", "-d", "2xcpu", "--force"], COMPILING),
        (["check", "PACKAGE", "--model", "MODEL", "--no-memory", "--verify", "always"], {*LOADING}),
        (["bench", "PACKAGE", "--runs", "2", "--no-memory", "--verify", "always"], {*LOADING, "timing"}),
        (["run", "PACKAGE", "--inputs", "INPUTS", "--outputs", "OUTPUTS", "--verify", "always"], {*LOADING}),
    ],
)
def test_bars_are_on_terminals_only(
    command: list[str],
    named: set[str],
    package: Path,
    new_decoder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other outputs get the results only."""
    save_arrays(tmp_path / "inputs.npz", decoder_feeds())
    places = {
        "MODEL": new_decoder,
        "PACKAGE": package,
        "INPUTS": tmp_path / "inputs.npz",
        "OUTPUTS": tmp_path / "o.npz",
    }
    places["OUTPUT"] = tmp_path / "compiled"
    asked = [str(places.get(word, word)) for word in command]
    assert splitc(*asked).stderr == ""
    made: list[Progress] = []

    class Kept(Progress):
        def start(self) -> None:
            made.append(self)
            super().start()

    monkeypatch.setattr(bars, "Progress", Kept)
    monkeypatch.setattr(terminal.err, "_force_terminal", True)
    monkeypatch.setattr(Progress, "remove_task", lambda *_: None)
    splitc(*asked)
    assert not any(each.disable for each in made)
    tasks = [task for each in made for task in each.tasks]
    assert {task.description for task in tasks} == named
    assert all(task.completed == task.total for task in tasks)
