"""A served package that breaks on each request is not loaded on each request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime import Session
from splitc.runtime.errors import EngineError, PackageError, SplitcError
from splitc.runtime.serving import served_package, waits
from splitc.runtime.serving.served_package import ServedPackage, ServedRequest
from splitc.runtime.serving.serving_file import FILE_NAME, Serving, write_serving
from tests.conftest import decoder_feeds

# Seconds that loading takes, by the clock of these tests.
LOADING = 100.0


class Clock:
    """A fake clock."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture
def opened(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sessions that were opened. Each breaks in its first request while `breaks` is true."""
    found: list[Any] = []

    class Breaking(Session):
        breaks = True

        def __init__(self, *given: Any, **options: Any) -> None:
            clock.now += LOADING
            super().__init__(*given, **options)
            found.append(self)

        def run(self, *given: Any, **options: Any) -> Any:
            if self.breaks:
                self._admission.fail(EngineError("rank 0 (cpu0) was ended by SIGSEGV"))
            return super().run(*given, **options)

    monkeypatch.setattr(served_package, "Session", Breaking)
    return found


def serve(package: Path, folder: Path) -> ServedPackage:
    write_serving(folder, Serving(str(package), threads=1))
    return ServedPackage(folder / FILE_NAME)


def ask(served: ServedPackage) -> str:
    """The error that a client gets; empty if there is none."""
    (answer,) = served.submit([ServedRequest(decoder_feeds())])
    error = answer.exception(20)
    return "" if error is None else str(error)


def test_package_without_its_adapter_keeps_no_session(package: Path, tmp_path: Path, opened: list[Any]) -> None:
    write_serving(tmp_path, Serving(str(package), threads=1, adapters={"style": "gone"}))
    with pytest.raises(SplitcError, match="has no slots for adapters"):
        ServedPackage(tmp_path / FILE_NAME)
    assert not opened[0].usable


def wait_out(served: ServedPackage, clock: Clock, seconds: float, times: int) -> None:
    """Check that requests fail without loading for this time."""
    told = f"broke {times} times in a row, so it is loaded again by the first request after {seconds:.0f} s. The last "
    assert told in ask(served) and told in ask(served)
    clock.now += seconds - 0.5
    assert "loaded again" in ask(served)
    clock.now += 1


def test_model_that_breaks_on_each_request(package: Path, tmp_path: Path, clock: Clock, opened: list[Any]) -> None:
    """It is loaded again at once, then after waits that double. After a long life, counting starts anew."""
    served = serve(package, tmp_path)
    assert "ended by SIGSEGV" in ask(served)
    for times, wait in enumerate((LOADING, 2 * LOADING, 4 * LOADING, waits.LONGEST, waits.LONGEST), start=2):
        assert "ended by SIGSEGV" in ask(served)
        assert len(opened) == times
        wait_out(served, clock, wait, times)
        assert len(opened) == times
    type(opened[-1]).breaks = False
    assert ask(served) == ask(served) == ""
    clock.now += waits.LONGEST + 1
    type(opened[-1]).breaks = True
    assert "ended by SIGSEGV" in ask(served)
    type(opened[-1]).breaks = False
    assert ask(served) == ""
    assert len(opened) == 8
    served.close()


def test_package_that_can_not_be_loaded_again(
    package: Path, tmp_path: Path, clock: Clock, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(package, tmp_path)

    def lacking(*given: object, **options: object) -> None:
        raise PackageError("rank0/stage0.onnx is missing")

    assert "ended by SIGSEGV" in ask(served)
    with monkeypatch.context() as patch:
        patch.setattr(served_package, "Session", lacking)
        assert ask(served) == "rank0/stage0.onnx is missing"
        wait_out(served, clock, waits.LEAST, 2)
    type(opened[-1]).breaks = False
    assert ask(served) == ""
    served.close()


def test_requests_after_the_end_open_nothing(package: Path, tmp_path: Path, opened: list[Any]) -> None:
    served = serve(package, tmp_path)
    served.close()
    (answer,) = served.submit([ServedRequest(decoder_feeds())])
    assert "this model was unloaded" in str(answer.exception())
    assert len(opened) == 1
