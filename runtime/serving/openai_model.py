"""The model that MLServer loads to answer OpenAI's requests. Its `model-settings.json` names the class.

MLServer executes this module again for each model that it loads, so objects that models share are in other modules.
"""

from __future__ import annotations

from pathlib import Path

from mlserver.handlers.custom import CustomHandler, register_custom_handler
from starlette.requests import Request
from starlette.responses import Response

from splitc.runtime.errors import MisuseError
from splitc.runtime.serving.mlserver_model import SplitcModel
from splitc.runtime.serving.openai_answers import WRITERS, Writer
from splitc.runtime.serving.served_package import ServedPackage
from splitc.runtime.serving.serving_file import read_serving
from splitc.runtime.serving.texts import Texts


class OpenAIModel(SplitcModel):
    """A package that writes texts, behind OpenAI's endpoints and behind the interface of MLServer."""

    async def load(self) -> bool:
        """Load the package and its tokenizer."""
        await super().load()
        self._writer = Writer(self.name, self._served, self._texts, self._show_metrics)
        WRITERS.add(self.name, self._writer)
        return True

    def _open(self, file: Path) -> ServedPackage:
        serving = read_serving(file)
        if serving.tokenizer is None:
            raise MisuseError(f"{file} names no tokenizer: export the package again, for 'openai'")
        self._texts = Texts(file.parent / serving.tokenizer, serving.context)
        return super()._open(file)

    async def unload(self) -> bool:
        """End the session, and the answers that are being written with it."""
        if hasattr(self, "_writer"):
            WRITERS.remove(self.name, self._writer)
            self._writer.close()
        return bool(await super().unload())

    async def list_models(self) -> Response:
        """The offered models."""
        return WRITERS.list_models()

    async def show_model(self, name: str) -> Response:
        """The offered model with this name."""
        return WRITERS.show_model(name)

    async def chat(self, request: Request) -> Response:
        """Answer the last message of a conversation."""
        return await WRITERS.respond(request, "messages")

    async def complete(self, request: Request) -> Response:
        """Continue a text."""
        return await WRITERS.respond(request, "prompt")


# All models of a server have the same ones: whichever gets a request asks the one that the request names.
for _method, _path, _endpoint in (
    ("GET", "/v1/models", OpenAIModel.list_models),
    ("GET", "/v1/models/{name}", OpenAIModel.show_model),
    ("POST", "/v1/chat/completions", OpenAIModel.chat),
    ("POST", "/v1/completions", OpenAIModel.complete),
):
    register_custom_handler(CustomHandler(rest_path=_path, rest_method=_method), _endpoint)
