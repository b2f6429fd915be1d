"""What is free in a container is divided among the ranks in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from splitc.runtime import Session
from splitc.runtime.errors import EngineError, PackageError
from splitc.runtime.hardware.devices import parse_devices
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.ranks import deployment
from splitc.runtime.ranks.deployment import PROCESS, divide_container
from tests.conftest import decoder_feeds
from tests.helpers.packages import compile_mode

SMALL, LARGE = decoder_feeds(batch=2, new=2, past=4), decoder_feeds(batch=64, new=64, past=64)
MIB = 1 << 20


def limit_to(free: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "memory_limit", lambda: (1 << 40, free))


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("mode", ["batch", "layer"])
def test_requests_beyond_a_ranks_share_fail_alone(
    decoder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, ranks: str
) -> None:
    package = compile_mode(decoder, mode)
    own = read_manifest(package).ranks
    loaded = sum(rank.loaded_bytes for rank in own * (2 // len(own))) + (ranks == "processes") * 2 * PROCESS
    limit_to(loaded + 8 * MIB, monkeypatch)
    with Session(package, ranks=ranks) as session:
        session.run(SMALL)
        with pytest.raises(EngineError, match="may take"):
            session.run(LARGE)
        session.run(SMALL)


def test_ranks_that_can_t_be_loaded_are_refused(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_to(20 * MIB, monkeypatch)
    said = "the ranks here need 2[0-9]\\.[0-9] MiB to be loaded, and 20.0 MiB is free in this container"
    with pytest.raises(PackageError, match=said):
        Session(compile_mode(decoder, "layer"))


def test_shares_are_what_ranks_need(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks elsewhere, and those with GPUs, get none of it."""
    manifest = read_manifest(compile_mode(decoder, "layer"))
    of = {"weights_bytes": 30, "engine_bytes": 10, "mapped_bytes": 0}
    ranks = [replace(rank, **of, total_bytes=size) for rank, size in zip(manifest.ranks, (60, 100), strict=True)]
    manifest = replace(manifest, ranks=ranks)
    devices = parse_devices(["2xcpu"])
    limit_to(160, monkeypatch)
    assert divide_container(manifest, devices, range(2)) == [30 + 20, 30 + 60]
    assert divide_container(manifest, devices, [1]) == [None, 30 + 120]
    assert divide_container(manifest, parse_devices(["cpu0", "cuda0"]), range(2)) == [30 + 120, None]
    limit_to(float("inf"), monkeypatch)
    assert divide_container(manifest, devices, range(2)) == [None, None]
