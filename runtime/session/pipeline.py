"""A pipeline's modules, each a session."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from splitc.runtime.adapters.asked import by_module
from splitc.runtime.errors import MisuseError
from splitc.runtime.files.listing import Listed, Listing
from splitc.runtime.generate.recipe import generate_text
from splitc.runtime.mpi.first_process import begin
from splitc.runtime.package.manifest_file import read_manifest, same_package
from splitc.runtime.package.pipeline_file import find_module, read_pipeline
from splitc.runtime.processes.device_processes import DeviceProcesses
from splitc.runtime.requests.rank_kinds import MPI
from splitc.runtime.requests.turns import Turns
from splitc.runtime.session.session import Session, choose_devices
from splitc.runtime.session.shared_ranks import SharedRanks, make_swap, need_turns
from splitc.runtime.units import first_few


class Pipeline(Listed, Mapping[str, Session]):
    """The modules of a package, loaded on their devices.

        with Pipeline("package") as pipeline:
            latents = pipeline["transformer"].run({"hidden_states": noise})

    - `options`: arguments of all sessions, such as `devices` and `ranks`. `own`: those of single modules, by name.
    - `adapters`: among the options, files as `unet=style.safetensors`, each with a factor. Their sum applies to all
      requests of this module.
    - `swap`: modules work in turn. Only the one at work has its weights in memory, and its requests wait until those of
      others have ended. Default: as the package was planned.

    Files that travel with the models are in the folder `package`, at the paths that they had in the models' folder.
    Modules that are split over the same GPUs work in turn too, as their all-reduces could deadlock.

    If ranks are processes, a device has one process, with the ranks of all modules. If it dies, the sessions of all
    modules in it break, with an error that says why.

    Raises as Session does, and MisuseError for the package of one model, for a module that does not exist, and under
    MPI for several modules.
    """

    def __init__(
        self,
        package: str | Path,
        *,
        swap: bool | None = None,
        own: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.package = Path(package)
        read = read_pipeline(self.package)
        if read is None:
            read_manifest(self.package)
            raise MisuseError(f"{package} has no modules: open it as a Session")
        names = [module.name for module in read.modules]
        if strange := sorted(own.keys() - set(names)):
            raise MisuseError(f"{package} has no module '{strange[0]}': there are {', '.join(names)}")
        _need_no_mpi(options.get("ranks"), len(names))
        adapters = by_module(options.pop("adapters", ()), names)
        asked = {name: {**options, "adapters": adapters[name], **own.get(name, {})} for name in names}
        folders = {name: find_module(self.package, name) for name in names}
        manifests = {name: read_manifest(folder) for name, folder in folders.items()}
        devices = {name: choose_devices(manifests[name], asked[name].get("devices")) for name in names}
        processes = DeviceProcesses(itertools.chain.from_iterable(devices.values()))
        self.swap = read.swap if swap is None else swap
        swap_buffers = make_swap({name: (manifests[name], devices[name]) for name in names}) if self.swap else {}
        in_turn = self.swap or need_turns(devices)
        shared = SharedRanks(processes, swap_buffers, Turns() if in_turn else None)
        self._stack = ExitStack()
        self._sessions: dict[str, Session] = {}
        try:
            for name in names:
                with same_package(folders[name], manifests[name]):
                    session = Session(package, module=name, shared=shared, **asked[name])
                    self._sessions[name] = self._stack.enter_context(session)
        except BaseException:
            processes.seal()  # before, so that those end that are waited for
            self.close()
            raise
        processes.seal()

    def __getitem__(self, name: str) -> Session:
        return self._sessions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    def generate(self, prompt: Sequence[int] | None = None, **options: Any) -> Generator[int, None, str]:
        """Yield the ids of the tokens that the modules make of a prompt's tokens, of a sound, or of images.

            pipeline.generate([13, 7, 1], max_new_tokens=20)
            pipeline.generate(sound="speech.wav", language="en")
            pipeline.generate(images=["cat.png"], question="What is this?")

        What the options leave open is taken from the configs in the package: see `generate.recipe.generate_text`.
        """
        return generate_text(self, self.package, prompt, **options)

    def close(self) -> None:
        """End all sessions."""
        self._stack.close()

    def _listing(self) -> Listing:
        rows = [
            [name, session.manifest.split_mode, first_few([str(device) for device in session.devices])]
            for name, session in self.items()
        ]
        return Listing(f"Pipeline of {self.package.name}: {first_few(list(self))}", ("module", "mode", "devices"), rows)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _need_no_mpi(ranks: str | None, modules: int) -> None:
    """Raise MisuseError if ranks are MPI's processes, which serve one session at a time."""
    if modules > 1 and ranks in (None, MPI) and begin() is not None:
        raise MisuseError(
            "ranks that MPI has started serve one module at a time: name it (--module; in Python Session(package, "
            'module=NAME)), or open all of them on one machine without MPI (--ranks processes; ranks="processes")'
        )
