"""Requests that name adapters, in Triton and in MLServer themselves. `make test-serving` runs this."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from splitc.runtime import Session
from splitc.runtime.serving.mlserver_folder import export_mlserver
from splitc.runtime.serving.serving_file import Serving
from splitc.runtime.serving.triton_repository import export_triton
from tests.conftest import assert_close, decoder_feeds
from tests.helpers.adapters import random_pairs, write_peft
from tests.helpers.clients import infer
from tests.helpers.feeds import LAYERS
from tests.helpers.servers import Server, has_mlserver, has_triton, ml_server, triton_server

SIZES = {f"model.layers.{layer}.self_attn.q_proj": (64, 64) for layer in range(LAYERS)}


@pytest.fixture(scope="module")
def style(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_peft(tmp_path_factory.mktemp("adapter") / "style", random_pairs(SIZES, 4, size=0.2))


@pytest.fixture(scope="module", params=["triton", "mlserver"])
def server(
    request: pytest.FixtureRequest, slotted: Path, style: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    is_triton = request.param == "triton"
    if not (has_triton() if is_triton else has_mlserver()):
        pytest.skip(f"needs {request.param}")
    serving = Serving("package", threads=1, adapters={"style": str(style)})
    export = export_triton if is_triton else export_mlserver
    export(slotted, folder / "models", serving, sequences=False)
    with (triton_server if is_triton else ml_server)(folder / "models", folder) as running:
        yield running


@pytest.mark.parametrize("protocol", ["json", "grpc"])
def test_requests_name_their_adapters(server: Server, slotted: Path, style: Path, protocol: str) -> None:
    from tritonclient.utils import InferenceServerException

    feeds = decoder_feeds(1, 2, 3)
    with Session(slotted) as session:
        session.adapters.load("style", style)
        for text, asked in (("style", {"style": 1.0}), ("style:0.5", {"style": 0.5})):
            given = infer(server, "decoder", feeds, protocol, parameters={"adapter": text})
            assert_close(given, session.run(feeds, adapters=asked))
        assert_close(infer(server, "decoder", feeds, protocol), session.run(feeds))
    with pytest.raises(InferenceServerException, match="no adapter 'other' is loaded: there are style"):
        infer(server, "decoder", feeds, protocol, parameters={"adapter": "other"})
