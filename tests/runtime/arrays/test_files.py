from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from splitc.runtime.arrays.array import Array
from splitc.runtime.arrays.files import load_arrays, save_arrays
from splitc.runtime.errors import FeedError, MisuseError
from splitc.runtime.files.written import check_output
from tests.helpers.fuzz import damage_bytes, seeds

ARRAYS: dict[str, Array] = {
    "a/b.c": np.arange(6, dtype=np.int64).reshape(2, 3),
    "half": np.ones(2, np.float16),
    "scalar": np.array(3.5),
}


def test_arrays_that_were_unpickled_keep_their_types(tmp_path: Path) -> None:
    """As with arrays from another rank."""
    arrays = {"f": np.ones(3, np.float32), "b": np.ones(2, np.bool_)}
    save_arrays(tmp_path / "a.npz", pickle.loads(pickle.dumps(arrays)))
    back = load_arrays(tmp_path / "a.npz")
    assert {name: array.dtype for name, array in back.items()} == {"f": np.float32, "b": np.bool_}


@pytest.mark.parametrize("name", ["arrays.npz", "arrays.json", "without ending ü"])
def test_arrays_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    save_arrays(tmp_path / name, ARRAYS)
    loaded = load_arrays(tmp_path / name)
    assert list(loaded) == list(ARRAYS)
    for key, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded[key], array)
        assert loaded[key].dtype == array.dtype
    assert [file.name for file in tmp_path.iterdir()] == [name]


# Names that np.savez, np.load, a path or polygraphy's JSON could take for something else.
ODD = ["file", "args", "kwds", "allow_pickle", "self", "arr_0", "x", "x.npy", "/a//b", "..", "a b", "ü", "pickle"]


@pytest.mark.parametrize("name", ["odd.npz", "odd.json"])
def test_any_name_comes_back(tmp_path: Path, name: str) -> None:
    arrays = {odd: np.full(2, number) for number, odd in enumerate(ODD)}
    save_arrays(tmp_path / name, arrays)
    found = [load_arrays(tmp_path / name)]
    if name == "odd.npz":
        with np.load(tmp_path / name) as archive:
            found.append({odd: archive[odd] for odd in archive.files})
    for loaded in found:
        assert {odd: array.tolist() for odd, array in loaded.items()} == {odd: [n, n] for n, odd in enumerate(ODD)}


@pytest.mark.parametrize("name", ["polygraphy_class", "ndarray"])
def test_name_that_polygraphy_takes_for_its_own_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(MisuseError, match=f"polygraphy's JSON can't hold arrays of these names.*{name}"):
        save_arrays(tmp_path / "out.json", {name: np.ones(2)})
    assert not list(tmp_path.iterdir())
    save_arrays(tmp_path / "out.npz", {name: np.ones(2)})
    assert load_arrays(tmp_path / "out.npz")[name].tolist() == [1, 1]


def test_folder_of_npy(tmp_path: Path) -> None:
    for name in ("x", "x.npy", "a/b", "file"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / f"{name}.npy", np.ones(3))
    assert set(load_arrays(tmp_path)) == {"x", "x.npy", "a/b", "file"}


@pytest.mark.parametrize("name", ["bad.npz", "bad.json"])
def test_file_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not arrays")
    with pytest.raises(FeedError, match="can't read arrays from"):
        load_arrays(tmp_path / name)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FeedError, match="no such file"):
        load_arrays(tmp_path / "none.npz")
    with pytest.raises(MisuseError, match="there is no folder"):
        save_arrays(tmp_path / "none" / "out.npz", ARRAYS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text.npz", "it is no file of numpy's, and should be an .npz archive"),
        ("empty.npz", "it is empty, and should be an .npz archive"),
        ("one.npz", r"it is a single array \(.npy\), without a name: put it as NAME.npy into a folder"),
        ("cut.npz", "the file is damaged"),
        ("folder", "x.npy: it is an .npz archive, and should be a single array"),
        ("nothing", "the folder has no files NAME.npy in it"),
        ("pipe", "it is a pipe or a device"),
        ("empty.json", r"polygraphy's JSON is a list of arrays by name, \[{NAME: ...}, ...\]"),
        ("circle.npz", "no such file"),
    ],
)
def test_what_a_file_is_instead(name: str, message: str, tmp_path: Path) -> None:
    save_arrays(tmp_path / "arrays.npz", ARRAYS)
    archive = (tmp_path / "arrays.npz").read_bytes()
    np.save(tmp_path / "one.npy", np.ones(3))
    contents = {"text.npz": b"hello", "empty.npz": b"", "cut.npz": archive[:200], "empty.json": b"[]"}
    for each, content in {**contents, "one.npz": (tmp_path / "one.npy").read_bytes()}.items():
        (tmp_path / each).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.npy").write_bytes(archive)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "circle.npz").symlink_to("circle.npz")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FeedError, match=message):
        load_arrays(tmp_path / name)
    if name == "circle.npz":
        check_output(tmp_path / "out.npz", [tmp_path / name])


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("kind", ["stored", "packed", "json"])
def test_damaged_files_end_in_a_message(kind: str, seed: int, tmp_path: Path) -> None:
    random, path = np.random.default_rng(seed), tmp_path / ("a.json" if kind == "json" else "a.npz")
    arrays = {"x": np.arange(100, dtype="f4").reshape(10, 10), "y": np.ones(3, "i8")}
    if kind == "packed":
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    else:
        save_arrays(path, arrays)
    whole = path.read_bytes()
    for _ in range(60):
        path.write_bytes(damage_bytes(whole, random))
        try:
            loaded = load_arrays(path)
        except FeedError:
            continue
        assert all(array.dtype.kind in "biufcV" for array in loaded.values())


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "null",
        "3",
        "[null]",
        "[3]",
        '["a"]',
        '[{"x": null}]',
        '[{"x": "a"}]',
        '[{"x": {"y": 1}}]',
        "[" * 9999,
    ],
)
def test_json_of_other_forms(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FeedError, match=r"can't read arrays from|which are no numbers"):
        load_arrays(tmp_path / "a.json")
    assert capsys.readouterr().out == ""


def test_arrays_that_claim_more_than_there_is(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    with pytest.raises(FeedError, match="can't read arrays from"):
        load_arrays(tmp_path / "a.npz")


def test_array_of_objects_is_not_said_to_be_damaged(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", a=np.array([[1, 2], [3]], object))
    with pytest.raises(FeedError, match=r"it holds Python objects .*Write arrays of a number type"):
        load_arrays(tmp_path / "objects.npz")
