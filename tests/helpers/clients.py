"""Clients of servers, by tritonclient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from splitc.runtime.arrays import Array
from tests.helpers.servers import Server


def infer(
    server: Server, model: str, feeds: Mapping[str, Array], protocol: str = "http", **options: Any
) -> dict[str, Array]:
    """The outputs that a client gets. `protocol` is http, json (http without binary data) or grpc."""
    from tritonclient import grpc, http
    from tritonclient.utils import np_to_triton_dtype

    library: Any = grpc if protocol == "grpc" else http
    inputs = [library.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)) for name, array in feeds.items()]
    plain = {"binary_data": False} if protocol == "json" else {}
    for each, array in zip(inputs, feeds.values()):
        each.set_data_from_numpy(np.ascontiguousarray(array), **plain)
    with library.InferenceServerClient(server.grpc if protocol == "grpc" else server.http) as client:
        if protocol == "json":
            names = [each["name"] for each in client.get_model_metadata(model)["outputs"]]
            options["outputs"] = [library.InferRequestedOutput(name, binary_data=False) for name in names]
        result = client.infer(model, inputs, **options)
        response = result.get_response()
        given = response.outputs if protocol == "grpc" else response["outputs"]
        outputs = [each.name if protocol == "grpc" else each["name"] for each in given]
        return {name: result.as_numpy(name) for name in outputs}


def generate(server: Server, model: str, prompt: list[int], count: int, key: int | str, protocol: str) -> list[int]:
    """Tokens that a client generates in a sequence, whose states stay on the server."""
    tokens: list[int] = []
    new, total = prompt, len(prompt)
    for number in range(count):
        feeds = {
            "input_ids": np.array([new]),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(total - len(new), total)[None],
        }
        ends: Any = {"sequence_start": number == 0, "sequence_end": number + 1 == count}
        outputs = infer(server, model, feeds, protocol, sequence_id=key, **ends)
        assert list(outputs) == ["logits"]
        new = [int(outputs["logits"][0, -1].argmax())]
        tokens += new
        total += 1
    return tokens
