"""What commands that run a package share."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitc.runtime import Session
from splitc.runtime.cli import run_options
from splitc.runtime.cli.run_options import measure_ranks
from splitc.runtime.tools.rank_memory import bytes_to_measure
from tests.conftest import decoder_feeds
from tests.helpers.packages import compile_mode


@pytest.mark.parametrize(("mode", "together"), [("layer", 1), ("tensor", 2)])
def test_memory_is_measured_where_there_is_room_beside_the_session(
    decoder: Path, mode: str, together: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the system would end the command. Ranks with common collectives are measured at the same time."""
    with Session(compile_mode(decoder, mode)) as session:
        sizes = sorted(rank.total_bytes for rank in session.manifest.ranks)
        needed = sum(sizes[-together:])
        assert bytes_to_measure(session.manifest) == needed
        monkeypatch.setattr(run_options, "host_memory", lambda: (1 << 40, needed - 1))
        assert measure_ranks(session, decoder_feeds()) == []
        assert "memory is not measured: that needs" in capsys.readouterr().err
        monkeypatch.setattr(run_options, "host_memory", lambda: (1 << 40, needed))
        assert len(measure_ranks(session, decoder_feeds())) == 2
