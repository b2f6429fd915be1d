from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from splitc.runtime.errors import MisuseError, SplitcError
from splitc.runtime.files.written import check_output, link_file, read_config, written_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_is_there_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"before")
    with written_whole(path) as file:
        file.write(b"after")
        assert path.read_bytes() == b"before"
    assert path.read_bytes() == b"after"
    assert names(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"before")
    with pytest.raises(error), written_whole(path) as file:
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"before"
    assert names(tmp_path) == ["plan.json"]


def test_several_write_the_same_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    with written_whole(path) as one, written_whole(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one", "the last one to end"
    assert names(tmp_path) == ["cache.json"]


def test_long_names_are_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250 + ".json")
    with written_whole(path) as file:
        file.write(b"content")
    assert names(tmp_path) == [path.name]


def test_archives_are_written_to_devices() -> None:
    with written_whole(Path(os.devnull)) as file:
        np.savez(file, a=np.zeros(3))


def test_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    with written_whole(path) as file:
        file.write(b"content")
    reader.join(10)
    assert read == [b"content"]
    assert path.is_fifo()


def test_link_keeps_leading_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with written_whole(tmp_path / "link") as file:
        file.write(b"content")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"content"


def test_standard_output_is_written_to() -> None:
    program = (
        "from pathlib import Path\nfrom splitc.runtime.files.written import written_whole\n"
        "with written_whole(Path('/dev/stdout')) as file: file.write(b'content')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    assert result.stdout == b"content"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", r"can't write \.: it is a folder"),
        ("none/plan.json", r"there is no folder .*none to write plan\.json into"),
        ("/dev/full", r"can't write /dev/full: the disk is full \(No space left on device\)"),
    ],
)
def test_what_can_not_be_written_is_named(path: str, message: str) -> None:
    with pytest.raises(SplitcError, match=message), written_whole(Path(path)) as file:
        file.write(b"content")


def test_folder_that_may_not_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *, follow_symlinks: bool = True) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(MisuseError, match=r"can't write .*: Permission denied"), written_whole(tmp_path / "a"):
        pass


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "package" / "rank0").mkdir(parents=True)
    (tmp_path / "model.onnx").touch()
    (tmp_path / "link").symlink_to(tmp_path / "package")
    read = [tmp_path / "model.onnx", tmp_path / "package"]
    for name in ("model.onnx", "package/../model.onnx", "package/manifest.json", "package/rank0/new", "link/new"):
        with pytest.raises(MisuseError, match=r"would be (overwritten|written into .*), which is read"):
            check_output(tmp_path / name, read)
    for name in ("other.onnx", "package.json"):
        check_output(tmp_path / name, read)


def test_files_are_linked_or_copied_where_links_can_not_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"a")
    link_file(tmp_path / "a", tmp_path / "linked")
    assert (tmp_path / "linked").samefile(tmp_path / "a")
    with pytest.raises(FileExistsError):
        link_file(tmp_path / "a", tmp_path / "linked")

    def refused(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("os.link", refused)
    link_file(tmp_path / "a", tmp_path / "copied")
    assert (tmp_path / "copied").read_bytes() == b"a" and not (tmp_path / "copied").samefile(tmp_path / "a")


@pytest.mark.parametrize(
    ("content", "said"), [(b"{", "is no JSON"), (b"[1]", r"should be a JSON object .*: it is \[1\]")]
)
def test_config_is_an_object(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(MisuseError, match=said):
        read_config(path)
