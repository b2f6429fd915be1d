"""How many of the runtime's functions a request calls.

Between two tokens a decoder reads all its weights, which leaves nothing of a session in the processor's caches. Then
each function takes microseconds, and all together a tenth of a small token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import splitc.runtime
from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.ranks.thread import Worker

OWN = str(Path(splitc.runtime.__file__).parent)


def model_of(pairs: int) -> str:
    """A model that negates as many inputs."""
    inputs, outputs = (", ".join(f"float[n] {letter}{n}" for n in range(pairs)) for letter in "xy")
    nodes = "\n".join(f"y{n} = Neg(x{n})" for n in range(pairs))
    return f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ {nodes} }}'


def count_calls(model: Path, folder: Path, pairs: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The calls of a request, on its own thread and on the rank's."""
    compile_model(plan_model(model, ["cpu0"], Request(split_mode="layer")), folder, verify=False)
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(OWN)

    serve = Worker._serve

    def counted(*given: Any) -> None:
        sys.setprofile(count)
        try:
            serve(*given)
        finally:
            sys.setprofile(None)

    feeds = {f"x{n}": np.ones(2, np.float32) for n in range(pairs)}
    with Session(folder, threads=1) as session:
        session.run(feeds)
        monkeypatch.setattr(Worker, "_serve", counted)
        sys.setprofile(count)
        try:
            session.run(feeds)
        finally:
            sys.setprofile(None)
    return calls


def test_a_request_calls_few_functions(
    write_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 and later have fewer, since comprehensions are no functions there."""
    one = count_calls(write_model(model_of(1)), tmp_path / "one", 1, monkeypatch)
    monkeypatch.undo()
    more = count_calls(write_model(model_of(11)), tmp_path / "more", 11, monkeypatch)
    assert one <= 110
    assert more - one <= 10 * 7
