"""Existing files stay, whatever happens while something else is written in their place."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from splitc.compiler.packaging.staging import check_target, written_aside
from splitc.runtime.errors import MisuseError

MANIFEST = '{"splitc": "0.9", "schema": 1, "files": [{"path": "rank0/a.onnx"}]}'


def write(folder: Path, text: str) -> Path:
    (folder / "rank0").mkdir(parents=True)
    (folder / "rank0" / "a.onnx").write_text(text)
    (folder / "manifest.json").write_text(MANIFEST)
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A package that splitc wrote, of an older version."""
    return write(tmp_path / "package", "old")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def replace(target: Path) -> None:
    with written_aside(target, replace=True) as folder:
        (folder / "new").write_text("new")


def test_package_is_replaced(old: Path) -> None:
    replace(old)
    assert names(old) == ["new"]
    assert names(old.parent) == ["package"]


def test_interrupt_while_the_old_package_is_removed(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def interrupted(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        unlink(*args, **options)

    monkeypatch.setattr(os, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace(old)
    assert names(old) == ["new"]
    assert names(old.parent) == ["package"]


@pytest.mark.parametrize("place", ["thesis.tex", "rank0/notes.txt", "rank0/deep/er/model.onnx"])
def test_package_with_something_else_in_it_stays(old: Path, place: str) -> None:
    (old / place).parent.mkdir(parents=True, exist_ok=True)
    (old / place).write_text("years of work")
    with pytest.raises(MisuseError, match="in it, which is not the package's, so --force does not replace it"):
        check_target(old, force=True)


@pytest.mark.parametrize("manifest", ['{"name": "an app"}', '{"splitc": 1, "files": []}', "[]", "", "\0", "[" * 9999])
def test_other_manifests_are_no_packages(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(MisuseError, match="is no package, so --force does not replace it"):
        check_target(tmp_path, force=True)


def test_files_and_links_are_not_replaced(old: Path) -> None:
    (old.parent / "file").touch()
    (old.parent / "link").symlink_to(old)
    (old.parent / "dangling").symlink_to(old.parent / "nowhere")
    for name, message in (("file", "is a file"), ("link", "is a link, to"), ("dangling", "is a link, to")):
        with pytest.raises(MisuseError, match=message):
            check_target(old.parent / name, force=True)


@pytest.mark.parametrize("which", [1, 2])
def test_error_between_the_renames_leaves_the_old_package(
    old: Path, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    renames = 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames == which:
            raise OSError(13, "no")
        return real(self, target)

    real = Path.rename
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="no"):
        replace(old)
    assert (old / "rank0" / "a.onnx").read_text() == "old"
    assert names(old.parent) == ["package"]


def test_what_a_process_left_that_was_killed_between_the_renames(old: Path) -> None:
    old.rename(old.with_name(".package.replaced"))
    old.with_name(".package.partial").mkdir()
    (old.with_name(".package.partial") / "half").touch()
    with pytest.raises(MisuseError, match="exists already"), written_aside(old, replace=False):
        pass
    assert (old / "rank0" / "a.onnx").read_text() == "old"
    assert names(old.parent) == ["package"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
def test_two_that_write_to_one_place(tmp_path: Path) -> None:
    target = tmp_path / "package"
    with written_aside(target, replace=False) as folder:
        (folder / "first").touch()
        with pytest.raises(MisuseError, match=r"another process is writing .*package: wait for it"):
            replace(target)
    assert names(target) == ["first"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
@pytest.mark.parametrize("comes", [True, False])
def test_a_lock_of_a_folder_that_was_renamed_is_none(
    comes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first writer ends as the second one waits for its lock, and a third one may come."""
    target = tmp_path / "package"
    flock = fcntl.flock
    with ExitStack() as first, ExitStack() as third:
        write(first.enter_context(written_aside(target, replace=True)), "first")

        def late(descriptor: int, how: int) -> None:
            monkeypatch.undo()
            first.close()
            if comes:
                write(third.enter_context(written_aside(target, replace=True)), "third")
            flock(descriptor, how)

        monkeypatch.setattr(fcntl, "flock", late)
        with pytest.raises(MisuseError, match=r"another process is writing .*package: wait for it"):
            replace(target)
    assert (target / "rank0" / "a.onnx").read_text() == ("third" if comes else "first")


def test_one_that_comes_meanwhile_stays(tmp_path: Path) -> None:
    target = tmp_path / "package"
    with pytest.raises(MisuseError, match="exists already"), written_aside(target, replace=False):
        target.mkdir()
        (target / "theirs").touch()
    assert names(tmp_path) == ["package"]
    assert names(target) == ["theirs"]


def test_names_that_no_file_may_have(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"can't write .*: File name too long"):
        replace(tmp_path / ("n" * 250))
    assert names(tmp_path) == []
