"""A pipeline's modules, each a session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from splitc.runtime.errors import MisuseError
from splitc.runtime.pipeline_file import read_pipeline
from splitc.runtime.session import Session


class Pipeline(Mapping[str, Session]):
    """The modules of a package, loaded on their devices.

        with Pipeline("package") as pipeline:
            latents = pipeline["transformer"].run({"hidden_states": noise})

    `options` are those of all sessions, and `own` those of single modules, by name. Files that travel with the models
    are in the folder `package`, where they were in the models' folder. Raises as Session does, and MisuseError for the
    package of one model, or a module that is not there.
    """

    def __init__(
        self, package: str | Path, *, own: Mapping[str, Mapping[str, Any]] = MappingProxyType({}), **options: Any
    ) -> None:
        self.package = Path(package)
        read = read_pipeline(self.package)
        if read is None:
            raise MisuseError(f"{package} has no modules: open it as a Session")
        names = [module.name for module in read.modules]
        if strange := sorted(own.keys() - set(names)):
            raise MisuseError(f"{package} has no module '{strange[0]}': there are {', '.join(names)}")
        self._stack = ExitStack()
        self._sessions: dict[str, Session] = {}
        try:
            for name in names:
                session = Session(package, module=name, **{**options, **own.get(name, {})})
                self._sessions[name] = self._stack.enter_context(session)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Session:
        return self._sessions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    def close(self) -> None:
        """End all sessions."""
        self._stack.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
