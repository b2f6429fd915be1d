"""Changed manifests, and manifests that contradict themselves, are refused before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitc.runtime import Session
from splitc.runtime.errors import PackageError, SplitcError
from splitc.runtime.package.manifest_file import read_manifest, seal
from splitc.runtime.package.parts import join_parts
from tests.conftest import assert_close, decoder_feeds, run_whole
from tests.helpers.feeds import VOCABULARY
from tests.helpers.fuzz import MORE, damage_json, seeds
from tests.helpers.packages import compile_mode

Fields = dict[str, Any]
Change = Callable[[Fields], object]


@pytest.fixture(params=["layer", "row", "tensor", "tensor in layers"])
def copy(request: pytest.FixtureRequest, decoder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(compile_mode(decoder, request.param), tmp_path / "copy")


@pytest.fixture
def layers(package: Path, tmp_path: Path) -> Path:
    return shutil.copytree(package, tmp_path / "copy")


@pytest.fixture
def stages(decoder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(compile_mode(decoder, "tensor in layers"), tmp_path / "copy")


def change(package: Path, how: Change) -> None:
    """Change the manifest deliberately: with the right hash."""
    path = package / "manifest.json"
    fields = json.loads(path.read_bytes())
    how(fields)
    path.write_bytes(seal(json.dumps(fields).encode()))


def refused(package: Path, how: Change, message: str) -> None:
    change(package, how)
    for verify in ("always", "never"):
        with pytest.raises(PackageError, match=message):
            Session(package, verify=verify)


def test_flipped_bits_are_found(copy: Path) -> None:
    path = copy / "manifest.json"
    whole = path.read_bytes()
    for place in np.random.default_rng(0).integers(len(whole), size=60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 7]) + whole[place + 1 :])
        with pytest.raises(PackageError, match=r"was changed since|is damaged|has schema version"):
            read_manifest(copy)


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../x", "..", "", "C:/x", "C:x", "a\\b", "\\\\host\\x", "a\0b"]
)
def test_paths_stay_inside(layers: Path, path: str) -> None:
    refused(layers, lambda m: m["ranks"][0]["engines"][0].update(path=path), "lies outside the package")
    refused(layers, lambda m: m["files"][0].update(path=path), "lies outside the package")


@pytest.mark.parametrize("threads", [0, -1, 10**6, 10**20])
def test_threads_that_no_system_starts(layers: Path, threads: int) -> None:
    refused(layers, lambda m: m.update(threads=threads), "threads for each CPU device")


def test_manifest_that_never_ends(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    os.mkfifo(copy / "manifest.json")
    with pytest.raises(PackageError, match=r"manifest\.json is no regular file"):
        read_manifest(copy)
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").symlink_to("/dev/zero")
    with pytest.raises(PackageError, match=r"manifest\.json is no regular file"):
        read_manifest(copy)


def test_manifest_of_other_bytes_than_text(copy: Path) -> None:
    path = copy / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"onnx", b"o\xffnx"))
    with pytest.raises(PackageError, match="is damaged"):
        read_manifest(copy)


def test_each_engine_is_a_file_that_is_verified(layers: Path) -> None:
    refused(layers, lambda m: m.update(files=[]), r"'rank0/stage0\.onnx' is not among its files")


@pytest.mark.parametrize(
    ("product", "message"),
    [
        ([8, 8, "int8"], "of type 'int8'"),
        ([0, 8, "float16"], "0 rows and 8"),
        ([8, 1 << 31, "float16"], "8 rows and 2"),
    ],
)
def test_products_that_can_not_be_computed(layers: Path, product: list[Any], message: str) -> None:
    match = rf"a product of 'rank0/stage0\.onnx' can't be computed: it.*{message}"
    refused(layers, lambda m: m["ranks"][0]["engines"][0].update(products=[product]), match)


def test_ranks_have_engines_of_their_own(layers: Path) -> None:
    def swap(fields: Fields) -> None:
        first, second = fields["ranks"][:2]
        first["engines"], second["engines"] = second["engines"], first["engines"]

    refused(layers, swap, r"rank 0 has the engine 'rank1/stage1\.onnx', which is not in the folder rank0")


def test_weights_lie_in_their_files(layers: Path) -> None:
    match = r"the weight '.*' ends outside of its file 'rank0/stage0\.weights'"
    refused(layers, lambda m: m["ranks"][0]["engines"][0]["weights"][0].__setitem__(4, 1 << 40), match)


def test_states_grow_along_an_axis_that_they_have(layers: Path) -> None:
    refused(layers, lambda m: m["states"][0].update(grows=99), "grows along axis 99, and it has 4 axes")


def test_files_that_are_there_twice(layers: Path) -> None:
    refused(layers, lambda m: m["files"].append(m["files"][0]), "is there 2 times")


def steps(fields: Fields, rank: int, kind: str) -> list[Fields]:
    return [step for step in fields["ranks"][rank]["program"] if step["type"] == kind]


def drop(fields: Fields, rank: int, kind: str) -> None:
    fields["ranks"][rank]["program"].remove(steps(fields, rank, kind)[0])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda m: drop(m, 0, "send"), "rank 1 waits for ever: rank 0 does not send it"),
        (lambda m: drop(m, 1, "run"), "needs '.*', which no step before it makes"),
        (lambda m: steps(m, 0, "run")[0].update(engine=7), "runs engine 7, and it has 1"),
        (lambda m: steps(m, 0, "run")[0].update(engine=-1), "runs engine -1, and it has 1"),
        (lambda m: steps(m, 0, "send")[0].update(target=0), "exchanges .* with rank 0"),
        (lambda m: steps(m, 0, "send")[0].update(target=9), "exchanges .* with rank 9"),
        (lambda m: steps(m, 0, "send")[0].update(target=2), "waits for ever|does not receive it"),
        (lambda m: steps(m, 1, "receive")[0].update(source=-1), "exchanges .* with rank -1"),
        (lambda m: steps(m, 1, "receive")[0].update(value="x"), "waits for ever|needs"),
        (lambda m: m["ranks"].pop(), "exchanges '.*' with rank 2|no rank gives"),
        (lambda m: m.update(ranks=[]), "it has no ranks"),
        (lambda m: m["ranks"][0]["inputs"].append("x"), "rank 0 takes 'x', which is no input"),
        (lambda m: m["ranks"][2]["outputs"].append("x"), "rank 2 gives 'x', which is no output"),
        (lambda m: m["ranks"][2]["outputs"].remove("logits"), "no rank gives the output 'logits'"),
        (lambda m: m["inputs"].append(m["inputs"][0]), "is there 2 times"),
        (lambda m: m["states"][0].update(output="x"), "is not from an output to an input"),
        (lambda m: m["batch"].update(x=0), "'x', which has a batch"),
    ],
)
def test_programs_that_do_not_fit(layers: Path, how: Change, message: str) -> None:
    refused(layers, how, message)


def shard(fields: Fields, rank: int, name: str) -> Fields:
    return next(part for part in fields["ranks"][rank]["parts"] if part["name"] == name)


def in_runs(*places: tuple[int, int]) -> Fields:
    """A shard of an axis by indices, as of several sections."""
    return {"sizes": [VOCABULARY], "ranges": [None], "places": [list(run) for run in places]}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda m: m["ranks"][2]["parts"].remove(shard(m, 2, "logits")), "'logits' do not cover it"),
        (lambda m: m["ranks"][2]["outputs"].remove("logits"), "shard of 'logits', which it neither|do not cover it"),
        (lambda m: shard(m, 2, "logits").update(shard(m, 3, "logits")), "'logits' do not cover it"),
        (lambda m: shard(m, 2, "logits")["axes"][0].update(axis=3), "'logits'"),
        (lambda m: shard(m, 2, "logits")["axes"][0].update(axis=0), "'logits'"),
        (lambda m: shard(m, 2, "logits")["axes"][0]["ranges"].__setitem__(0, [5, 2]), "no possible shard of 'logits'"),
        (lambda m: shard(m, 2, "logits")["axes"][0]["ranges"].__setitem__(0, [0, 999]), "no possible shard"),
        (lambda m: shard(m, 2, "logits")["axes"][0].update(sizes=[]), "no possible shard of 'logits'"),
        (lambda m: shard(m, 0, "past_key_values.0.key")["axes"][0].update(sizes=[7]), "no possible shard of 'past"),
        (lambda m: shard(m, 0, "past_key_values.0.key")["axes"][0].update(axis=9), "no possible shard of 'past"),
        (lambda m: shard(m, 2, "logits")["axes"].append(shard(m, 2, "logits")["axes"][0]), "cut twice along an axis"),
        (lambda m: shard(m, 2, "logits")["axes"][0].update(in_runs((0, 4), (2, 6))), "no possible shard of 'logits'"),
        (lambda m: shard(m, 2, "logits")["axes"][0].update(in_runs((0, 4), (5, 9999))), "no possible shard"),
        (lambda m: shard(m, 2, "logits")["axes"][0].update(in_runs((4, 4))), "no possible shard"),
        (lambda m: shard(m, 2, "logits").update(name="x"), "shard of 'x', which it neither takes nor gives"),
        (lambda m: m["ranks"][2]["parts"].append(shard(m, 2, "logits")), "rank 2 has 2 shards of 'logits'"),
    ],
)
def test_shards_that_are_not_all(stages: Path, how: Change, message: str) -> None:
    refused(stages, how, message)


def test_outputs_of_shards_that_do_not_fit_together_are_said(stages: Path) -> None:
    """As if an engine returned another size than it was built for."""
    parts = [part for rank in read_manifest(stages).ranks for part in rank.parts if part.name == "logits"]
    arrays = [np.zeros((1, rows, 48), np.float32) for rows in (1, 2)]
    with pytest.raises(PackageError, match="shards of 'logits' do not fit together: 1 x 1 x 48, 1 x 2 x 48"):
        join_parts(list(zip(parts, arrays, strict=True)))


def test_engines_that_meet_run_alike(copy: Path) -> None:
    fields = json.loads((copy / "manifest.json").read_bytes())
    if not any(engine["group"] for engine in fields["ranks"][1]["engines"]):
        pytest.skip("no engines meet")
    refused(copy, lambda m: m["ranks"][1]["program"].append(steps(m, 1, "run")[-1]), "waits for ever: not all of the")


def test_groups_that_do_not_fit(stages: Path) -> None:
    engine = next(each for each in json.loads((stages / "manifest.json").read_bytes())["ranks"][0]["engines"])
    if not engine["group"]:
        pytest.skip("without the library of operators, engines do not meet")
    refused(stages, lambda m: m["ranks"][0]["engines"][0].update(group=[0]), "another number")
    refused(stages, lambda m: m["ranks"][0]["engines"][0].update(group=[0, 9]), "has collectives with the ranks")
    refused(stages, lambda m: m["ranks"][0]["engines"][0].update(group=[1]), "has collectives with the ranks")


def test_rows_to_keep_are_those_of_a_tensor(copy: Path) -> None:
    refused(copy, lambda m: m["kept_rows"].update(reads=["words", 1]), "counted in 'words', which there is not")
    refused(
        copy, lambda m: m["kept_rows"].update(reads=["input_ids", 2]), "counted in axis 2 of 'input_ids', which has"
    )
    refused(
        copy, lambda m: m["kept_rows"].update(reads=["input_ids", 1], outputs={"logits": 3}), "keeps rows of axis 3"
    )


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(1))
def test_random_changes_end_in_a_message_or_change_nothing(copy: Path, decoder: Path, seed: int) -> None:
    """There is no traceback, no hang, and no wrong result."""
    feeds = decoder_feeds()
    expected = run_whole(decoder, feeds)
    original = (copy / "manifest.json").read_bytes()
    random = np.random.default_rng(seed)
    loaded, began = 0, time.monotonic()
    for _ in range(12 if MORE == 1 else 40):
        (copy / "manifest.json").write_bytes(original)
        # Whole ranks are not swapped: engines hold the places of those that they meet, which no manifest says.
        change(copy, lambda fields: damage_json(fields, random, fields["ranks"]))
        try:
            with Session(copy, verify="never", threads=1) as session:
                outputs = session.run(feeds)
        except SplitcError:
            continue
        loaded += 1
        common = [name for name in expected if name in outputs]
        assert_close({name: outputs[name] for name in common}, {name: expected[name] for name in common})
    assert loaded > 0
    assert time.monotonic() - began < 100


# What msgspec knows of a type is made when it is first wanted, and threads that want it at once crashed it.
AT_ONCE = """
import sys, threading
from pathlib import Path
from splitc.runtime.package.manifest_file import read_manifest

sys.setswitchinterval(1e-6)
gate = threading.Barrier(8)

def read():
    gate.wait()
    read_manifest(Path(sys.argv[1]))

threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_be_the_first_to_read_manifests_all_at_once(layers: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", AT_ONCE, str(layers)]) for _ in range(3)]
    assert [process.wait() for process in running] == [0] * len(running)
