"""Comparing a package's files with its manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from splitc.compiler import compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import MisuseError, PackageError
from splitc.runtime.package import verification
from splitc.runtime.package.files import describe_files, hash_package_file
from splitc.runtime.package.manifest import File
from splitc.runtime.package.manifest_file import seal
from splitc.runtime.package.verification import ALWAYS, NEVER, ONCE, STAMP, verify_files
from tests.conftest import LAYER
from tests.helpers.packages import compile_mode


@pytest.fixture
def files(tmp_path: Path) -> list[File]:
    (tmp_path / "some.weights").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "none.weights").write_bytes(b"")
    return describe_files(tmp_path, tmp_path.iterdir())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read."""
    read: list[str] = []

    def watch(path: Path, *rest: object) -> str:
        read.append(path.name)
        return hash_package_file(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(verification, "hash_package_file", watch)
    return read


def test_files_are_read_once(tmp_path: Path, files: list[File], read: list[str]) -> None:
    """And again after they changed, which their times show, even if one of the times was set back."""
    for verify, reads in ((ONCE, 2), (ONCE, 0), (ALWAYS, 2), (NEVER, 0), (ONCE, 0)):
        read.clear()
        verify_files(tmp_path, files, verify)
        assert len(read) == reads
    path = tmp_path / "some.weights"
    before = path.stat()
    path.write_bytes(bytes(reversed(path.read_bytes())))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(PackageError, match=r"some\.weights was changed since it was compiled"):
            verify_files(tmp_path, files, ONCE)


def another_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The home of a new container."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_a_new_container_reads_nothing(
    tmp_path: Path,
    files: list[File],
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The folder is mounted elsewhere. A copy has its own times, even if it preserves all that it can."""
    places = tmp_path_factory.mktemp("places")
    package = tmp_path.rename(places / "package")
    verify_files(package, files, ONCE)
    another_home(monkeypatch, tmp_path_factory)
    elsewhere = package.rename(places / "elsewhere")
    verify_files(elsewhere, files, ONCE)
    assert len(read) == 2
    verify_files(shutil.copytree(elsewhere, package), files, ONCE)
    assert len(read) == 4


def test_package_that_can_not_be_written_to(
    tmp_path: Path,
    files: list[File],
    read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The comparison is recorded for this user. An older stamp does not hide it."""
    verify_files(tmp_path, files, ONCE)
    (tmp_path / "some.weights").touch()
    monkeypatch.setattr(verification, "written_whole", fail)
    another_home(monkeypatch, tmp_path_factory)
    for reads in (3, 3):
        verify_files(tmp_path, files, ONCE)
        assert len(read) == reads


def fail(path: Path) -> None:
    raise MisuseError(f"can't write {path}: Read-only file system")


def test_nowhere_to_remember(
    tmp_path: Path, files: list[File], read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "some.weights"))
    monkeypatch.setattr(verification, "written_whole", fail)
    for _ in range(2):
        verify_files(tmp_path, files, ONCE)
    assert len(read) == 4


def test_a_link_in_place_of_a_stamp_is_not_written_through(tmp_path: Path, files: list[File]) -> None:
    other = tmp_path / "other"
    other.write_text("somebody's")
    (tmp_path / STAMP).symlink_to(other)
    verify_files(tmp_path, files, ONCE)
    assert other.read_text() == "somebody's"


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": 2}', b"\xff", b"[" * 100_000, None])
def test_stamps_that_are_none(tmp_path: Path, files: list[File], read: list[str], content: bytes | None) -> None:
    """Including a pipe, on which reading would block."""
    if content is None:
        os.mkfifo(tmp_path / STAMP)
    else:
        (tmp_path / STAMP).write_bytes(content)
    verify_files(tmp_path, files, ONCE)
    assert len(read) == 2


def test_a_stamp_is_part_of_its_package(decoder: Path, tmp_path: Path) -> None:
    """It does not prevent replacing the package."""
    plan = plan_model(decoder, ["2xcpu"], LAYER)
    compile_model(plan, tmp_path / "package")
    Session(tmp_path / "package").close()
    assert (tmp_path / "package" / STAMP).is_file()
    compile_model(plan, tmp_path / "package", force=True)
    assert not (tmp_path / "package" / STAMP).exists()


def test_packages_with_the_hashes_of_before(decoder: Path, tmp_path: Path) -> None:
    package = shutil.copytree(compile_mode(decoder, "layer"), tmp_path / "copy")
    path = package / "manifest.json"
    fields = json.loads(path.read_bytes())
    fields["schema"] = 3
    for file in fields["files"]:
        del file["blake3"]
        file["sha256"] = hashlib.sha256((package / file["path"]).read_bytes()).hexdigest()
    path.write_bytes(seal(json.dumps(fields).encode()))
    Session(package).close()
    weights = package / "rank0" / "stage0.weights"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    with pytest.raises(PackageError, match=r"stage0\.weights was changed"):
        Session(package)


def test_unknown_verify_is_refused(decoder: Path) -> None:
    with pytest.raises(MisuseError, match="verify is 'always', 'once', 'never', not 'twice'"):
        Session(compile_mode(decoder, "layer"), verify="twice")
