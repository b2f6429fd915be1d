"""Clients of servers, by tritonclient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from splitc.runtime.arrays.array import Array
from tests.helpers.servers import Server


class Client:
    """A client with its own connection. `protocol` is http, json (http without binary data) or grpc."""

    def __init__(self, server: Server, protocol: str = "http", seconds: float = 60.0) -> None:
        from tritonclient import grpc, http

        self._protocol, self._seconds = protocol, seconds
        self._library: Any = grpc if protocol == "grpc" else http
        if protocol == "grpc":
            self._client = grpc.InferenceServerClient(server.grpc)
        else:
            self._client = http.InferenceServerClient(server.http, connection_timeout=seconds, network_timeout=seconds)
        self._outputs: dict[str, list[str]] = {}

    def infer(self, model: str, feeds: Mapping[str, Array], **options: Any) -> dict[str, Array]:
        """Send a request, and return its outputs."""
        from tritonclient.utils import np_to_triton_dtype

        plain = {"binary_data": False} if self._protocol == "json" else {}
        inputs = []
        for name, array in feeds.items():
            inputs.append(self._library.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(np.ascontiguousarray(array), **plain)
        if self._protocol == "grpc":
            options["client_timeout"] = self._seconds
        outputs = [self._library.InferRequestedOutput(name, **plain) for name in self._names(model)]
        result = self._client.infer(model, inputs, outputs=outputs, **options)
        return {name: result.as_numpy(name) for name in self._names(model)}

    def _names(self, model: str) -> list[str]:
        """The names of the model's outputs."""
        if model not in self._outputs:
            found = self._client.get_model_metadata(model)
            outputs = found.outputs if self._protocol == "grpc" else found["outputs"]
            self._outputs[model] = [each.name if self._protocol == "grpc" else each["name"] for each in outputs]
        return self._outputs[model]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def infer(
    server: Server, model: str, feeds: Mapping[str, Array], protocol: str = "http", **options: Any
) -> dict[str, Array]:
    """The outputs of one request, sent by a new client."""
    client = Client(server, protocol)
    try:
        return client.infer(model, feeds, **options)
    finally:
        client.close()


def generate(server: Server, model: str, prompt: list[int], count: int, key: int | str, protocol: str) -> list[int]:
    """The tokens that a client generates in a sequence, whose states stay on the server."""
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
