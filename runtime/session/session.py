"""Session: load a package, with a thread or a process for each rank, and run requests."""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from splitc.runtime.arrays.array import Array
from splitc.runtime.engines.built_here import check_built_here, check_host_code
from splitc.runtime.engines.kinds import choose_engine
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.checks import Inputs
from splitc.runtime.feeds.on_gpu import Feed, on_host
from splitc.runtime.feeds.rows import cut_batches, join_batches
from splitc.runtime.files.listing import Listed, Listing
from splitc.runtime.generate.tokens import generate
from splitc.runtime.gpu.weight_places import SwapBuffer
from splitc.runtime.hardware.devices import Device, parse_devices, threads_for
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.mpi.first_process import begin
from splitc.runtime.mpi.ranks import MpiRanks
from splitc.runtime.mpi.world import World
from splitc.runtime.package.manifest import Manifest, Tensor
from splitc.runtime.package.manifest_file import read_manifest, same_package
from splitc.runtime.package.pipeline_file import find_module
from splitc.runtime.package.verification import NEVER, ONCE, Verification, check_word, engine_files
from splitc.runtime.processes.ranks import RankProcesses
from splitc.runtime.processes.remote import RemoteRanks
from splitc.runtime.ranks.deployment import Deployment, divide_container
from splitc.runtime.ranks.loaded import Setup, make_backend_of
from splitc.runtime.ranks.request import Execution, InFlightRequest
from splitc.runtime.ranks.workers import Workers
from splitc.runtime.requests.added_feeds import needs_one_row
from splitc.runtime.requests.admission import MOST_AT_ONCE, Admission
from splitc.runtime.requests.empty_states import unfed_states
from splitc.runtime.requests.metrics import Metrics
from splitc.runtime.requests.preamble import open_preamble
from splitc.runtime.requests.rank_kinds import MPI, PROCESSES, choose_ranks
from splitc.runtime.requests.replicas import Replicas
from splitc.runtime.requests.requests import Requests
from splitc.runtime.requests.sequence import StateSequence
from splitc.runtime.requests.telemetry import Telemetry
from splitc.runtime.session import asynchronous
from splitc.runtime.session.shared_ranks import SharedRanks
from splitc.runtime.threads.futures import in_order, then
from splitc.runtime.threads.interrupts import later_interrupts
from splitc.runtime.units import first_few, format_shape, plural, whole_number

# Adapters by name, each with its factor; or one adapter's name; or None for the session's default.
Asked = Mapping[str, float] | str | None


class Session(Requests, Listed):
    """A package, loaded on its devices and ready to run.

        with Session("package") as session:
            outputs = session.run({"input_ids": ids})  # arrays by name, in the shapes of `session.outputs`

    - `module`: the model of a package that has several.
    - `threads`: those of each CPU device (default: the package's, or else the cores divided among the devices).
    - `verify`: how often the files' hashes are compared with the manifest, which reads every byte: `always`, `once`
      (again when a file has changed), or `never`. Weights are compared while they are loaded.
    - `devices`: names such as `cpu0`, in place of the package's, one for each rank. A package that divides rows runs on
      any number of groups of them. An ONNX Runtime package for GPUs also runs on CPU devices, and the other way round.
    - `cuda_graphs`: whether GPUs replay requests of previously seen shapes as CUDA graphs.
    - `in_flight`: the most requests in flight (default: two for each rank). It bounds the memory of their arrays.
    - `ranks`: `threads`, `processes` or `mpi`. Default: mpi under mpirun, else threads on CPU devices and a single GPU,
      else processes, as ranks on several GPUs always are. If a process crashes, only sessions with ranks in it break.
    - `host_code`: allows engines with their own code for the host, such as TensorRT's version-compatible ones.
    - `adapters`: files, each with a factor, or as on the command line (`style:0.8`). Their weighted sum applies to all
      requests that do not name others.
    - `shared`: the resources that the modules of a Pipeline share.

    Any number of threads may use one session. Raises PackageError for a package that is missing or damaged, or can't be
    loaded here (a library or a GPU is missing), MisuseError for arguments and devices that do not fit it.
    """

    def __init__(
        self,
        package: str | Path,
        *,
        module: str | None = None,
        threads: int | None = None,
        verify: str = ONCE,
        in_flight: int | None = None,
        devices: Sequence[str] | None = None,
        cuda_graphs: bool = True,
        ranks: str | None = None,
        host_code: bool = False,
        adapters: str | Sequence[str | tuple[str, float]] = (),
        shared: SharedRanks | None = None,
    ) -> None:
        self.package = find_module(Path(package), module)
        check_word(verify)
        world = begin() if ranks in (None, MPI) else None
        manifest = read_manifest(self.package)
        own = choose_devices(manifest, devices)
        self.in_flight = whole_number("--in-flight", 2 * len(own) if in_flight is None else in_flight, 1, MOST_AT_ONCE)
        check_host_code(self.package, manifest, host_code)
        kind = choose_ranks(ranks, own, world, shared.processes.devices if shared else ())
        super().__init__(manifest, own, kind)
        if kind != MPI:  # where each rank does so for itself
            check_built_here(self.package, manifest, own)
        self._states = frozenset(state.input for state in manifest.states)
        self._whole = Inputs(manifest.inputs, manifest.omittable, manifest.fixed)
        begun = [tensor for tensor in manifest.inputs if tensor.name not in self._states]
        self._begins = Inputs(begun, manifest.omittable, manifest.fixed) if self._states else None
        hashes = NEVER if kind == MPI else verify
        verification = Verification(self.package, manifest.files, hashes, engine_files(manifest))
        self.threads = threads_for(own, manifest.threads if threads is None else threads)
        self.adapters.use_files(adapters)
        self._cuda_graphs, self._kind = cuda_graphs, kind
        own_threads = (threads or 0) if kind == MPI else self.threads
        make = partial(self._make_ranks, shared, world, verify)
        folder = self.package.absolute()  # some engines are loaded later
        shares = divide_container(manifest, own, () if kind == MPI else range(len(own)), kind == PROCESSES)
        whole = Deployment(folder, manifest, own, own_threads, cuda_graphs, shares, all_devices=own)
        made = list(map(make, whole.replicas()))
        if len(made) > 1:
            self._replicas = Replicas(made, manifest, choose_shares(manifest, len(made)))
        self._workers: Workers | RemoteRanks | Replicas = self._replicas or made[0]
        turns = shared.turns if shared else None
        self._telemetry = Telemetry(self.package.name, own)
        self._admission = Admission(self._workers, manifest, self.in_flight, self._telemetry, turns)
        began = time.perf_counter()
        self._start(verification)
        self._telemetry.loaded(time.perf_counter() - began)

    def _make_ranks(
        self, shared: SharedRanks | None, world: World | None, verify: str, deployment: Deployment
    ) -> Workers | RemoteRanks:
        """The ranks of one replica, not yet started: those of MPI if there is a `world`."""
        broken = partial(_fail, weakref.ref(self))
        swap = shared.swap if shared else {}
        if world is not None:
            return MpiRanks(world, deployment, verify, broken)
        if self._kind == PROCESSES:
            own_processes = shared.processes if shared else None
            return RankProcesses(deployment, self.in_flight, broken, own_processes, swap)
        return _make_threads(deployment, broken, swap)

    def _start(self, verification: Verification) -> None:
        """Start the ranks while the files are verified. If that fails or is interrupted, all is ended."""
        started = False
        try:
            verification.begin()
            with later_interrupts():  # what is started is ended
                self._workers.start()
                # When the session is dropped without being closed, and when Python ends.
                self._end = weakref.finalize(self, self._admission.close)
                started = True
            with same_package(self.package, self.manifest):
                self._workers.wait_loaded()
                verification.finish()
                self._preamble = open_preamble(self.package, self.manifest)
        except BaseException as error:
            with later_interrupts():  # another one
                verification.stop()
                if started:
                    self._admission.fail(error)
                    self.close()
            raise

    @property
    def replays(self) -> bool:
        """Whether requests of previously seen shapes are replayed as CUDA graphs."""
        return self._cuda_graphs and all(device.kind == "cuda" for device in self.devices)

    @property
    def notes(self) -> list[str]:
        """Messages for the user about adapters, engines and replay."""
        return [*self.adapters.notes, *self._workers.notes]

    @property
    def metrics(self) -> Metrics:
        """What the session has done so far: counters of its requests, and seconds by rank."""
        return self._telemetry.counters.read()

    def device_memory(self) -> list[RankMemory]:
        """The ranks' memory since the session began, and predictions; empty for threads on CPU devices."""
        return self._workers.device_memory()

    @property
    def inputs(self) -> list[Tensor]:
        """The model's inputs: names, number types and shapes."""
        return self.manifest.inputs

    @property
    def optional(self) -> list[Tensor]:
        """Inputs that need not be fed, since there are default values for them."""
        return self.manifest.omittable

    @property
    def outputs(self) -> list[Tensor]:
        """The model's outputs: names, number types and shapes."""
        return self.manifest.outputs

    def run(
        self,
        feeds: Mapping[str, npt.ArrayLike],
        *,
        micro_batch: int | None = None,
        on_device: bool = False,
        adapters: Asked = None,
    ) -> dict[str, Array]:
        """Run the model once. Feeds and outputs are arrays by name, in the shapes of the model's inputs and outputs.

        States (caches, recurrent states) begin empty if none of them is fed.

        A feed may be a tensor of PyTorch, or on a GPU: an object with `__dlpack__` or `__cuda_array_interface__`. It is
        copied from GPU to GPU if the only rank is a thread with a GPU, else over the host. With `on_device`, outputs
        are CuPy arrays on the rank's GPU. `micro_batch` cuts the batch into micro-batches of this many rows, which are
        in flight together. `adapters` are loaded adapters by name, with factors: {"style": 0.8}. Raises FeedError for
        feeds that do not fit the model, MisuseError if the batch can't be cut, outputs can't be on GPUs or an adapter
        is not loaded, EngineError if an engine fails, SplitcError if the session is closed or broken.
        """
        alone = self.manifest.batch is not None and any(length.one_row for length in self.manifest.lengths)
        if micro_batch is None and alone:
            micro_batch = 1 if needs_one_row(self.manifest.lengths, self._take(feeds)) else None
        if micro_batch is None:
            return self.run_timed(feeds, on_device, adapters)[0]
        if on_device:
            raise MisuseError("on_device: the outputs of micro-batches are joined on the host: leave one of both out")
        arrays = {name: on_host(feed) for name, feed in self._take(feeds).items()}
        batches = cut_batches(arrays, self.manifest.batch, micro_batch, self.manifest.row_sources)
        held = self.adapters.sum(adapters)
        answers = list(
            in_order((self._answer(InFlightRequest(batch, adapters=held)) for batch in batches), self.in_flight)
        )
        return join_batches(answers, self.manifest.batch)

    def run_timed(
        self, feeds: Mapping[str, npt.ArrayLike], on_device: bool = False, adapters: Asked = None
    ) -> tuple[dict[str, Array], dict[int, Execution]]:
        """As `run`, and also returns when each rank ran its steps."""
        held = self.adapters.sum(adapters)
        request = InFlightRequest(self._take(feeds), on_device=on_device, adapters=held)
        self.submit_request(request, here=True).result()
        return self.join(request), request.executions

    def submit(
        self, feeds: Mapping[str, npt.ArrayLike], *, on_device: bool = False, adapters: Asked = None
    ) -> Future[dict[str, Array]]:
        """Start a request and return a future of its outputs. Requests run in the order of submission.

        The feeds are copied, so they may be changed afterwards. Waits while `in_flight` requests are in flight. A
        failed request does not affect others. The future's `cancel` works until a rank has begun the request. For
        `on_device`, `adapters` and what it raises, see `run`.
        """
        return self._begin(InFlightRequest({}, on_device=on_device), feeds, adapters)

    def _begin(
        self, request: InFlightRequest, feeds: Mapping[str, npt.ArrayLike], adapters: Asked
    ) -> Future[dict[str, Array]]:
        """Start a new request with a copy of the feeds."""
        request.feeds, request.adapters = self._take(feeds, copy=True), self.adapters.sum(adapters)
        return self._answer(request)

    def _take(self, feeds: Mapping[str, npt.ArrayLike], copy: bool = False) -> dict[str, Feed]:
        """The feeds as arrays. If no state is fed, all states begin empty, as in a sequence."""
        if not self._begins or not isinstance(feeds, Mapping) or not self._states.isdisjoint(feeds):
            return self._whole.take(feeds, copy, self.device_arrays.feeds)
        taken = self._begins.take(feeds, copy, self.device_arrays.feeds)
        return {**taken, **unfed_states(self.manifest, taken)}

    def _answer(self, request: InFlightRequest) -> Future[dict[str, Array]]:
        """Start a request whose arrays nobody changes in flight. Returns a future of its outputs."""
        return then(self.submit_request(request), self.join, request.withdraw)

    def map(
        self, feeds: Iterable[Mapping[str, npt.ArrayLike]], *, in_flight: int | None = None, adapters: Asked = None
    ) -> Iterator[dict[str, Array]]:
        """Run each of the feeds, and yield the outputs in the same order.

        `in_flight` of them run at a time, at most the session's. Feeds are taken lazily. The first failed request ends
        the iteration with its error.
        """
        submit = partial(self.submit, adapters=adapters)
        return in_order(map(submit, feeds), self._at_once(in_flight))

    def _at_once(self, asked: int | None) -> int:
        """The number of requests of a stream in flight."""
        return self.in_flight if asked is None else min(whole_number("--in-flight", asked, 1), self.in_flight)

    async def run_async(self, feeds: Mapping[str, npt.ArrayLike], *, adapters: Asked = None) -> dict[str, Array]:
        """As `run`, for asyncio: `asyncio.wait_for` limits its time, and a cancelled task cancels the request.

        That has no effect once a rank has begun the request.
        """
        request = InFlightRequest({})
        return await asynchronous.run(partial(self._begin, request, feeds, adapters), request.withdraw)

    def map_async(
        self, feeds: Iterable[Mapping[str, npt.ArrayLike]], *, in_flight: int | None = None, adapters: Asked = None
    ) -> AsyncIterator[dict[str, Array]]:
        """As `map`, for asyncio: `async for outputs in session.map_async(feeds)`."""
        run = partial(self.run_async, adapters=adapters)
        return asynchronous.run_each(run, feeds, self._at_once(in_flight))

    def start(self, capacity: int | None = None, *, adapters: Asked = None) -> StateSequence:
        """Open a sequence: its states (caches, recurrent states) stay on the ranks from request to request.

        With `capacity`, caches that an engine can write in place are allocated for this many tokens. Without it, and
        for other caches, each request allocates new, longer ones. All requests of the sequence have the `adapters`: see
        `run`. Raises MisuseError if the model has no states, and for a capacity that is no number of tokens.
        """
        self.check_usable()
        if not self.manifest.states:
            raise MisuseError(
                f"{self.manifest.source.name} has no states: none of its outputs goes into an input again"
            )
        return StateSequence(self, capacity, self.adapters.sum(adapters))

    def generate(self, prompt: npt.ArrayLike, **options: Any) -> Generator[int, None, str]:
        """Yield the ids of the tokens that follow a prompt's: see `generate.tokens.generate` for the options."""
        return generate(self, prompt, **options)

    @property
    def usable(self) -> bool:
        """Whether requests can be run: the session is not closed, and none of its ranks has died."""
        return self._admission.usable

    def check_usable(self) -> None:
        """Raise SplitcError, which says why, if requests can't be run."""
        self._admission.check_usable()

    def close(self) -> None:
        """End the ranks and free their engines, in bounded time.

        Requests that have begun are completed, or stopped after 10 seconds. Others are cancelled. A session that is
        dropped, or still open when Python ends, is closed by itself.
        """
        self._admission.close()
        self._end.detach()  # only now: an interrupt may have come before

    def _listing(self) -> Listing:
        manifest = self.manifest
        devices = first_few([str(device) for device in self.devices])
        rows = [
            [kind, tensor.name, tensor.dtype, format_shape(tensor.shape)]
            for kind, tensors in manifest.tensors.items()
            for tensor in tensors
        ]
        title = f"Session of {self.package.name}: {manifest.source.name}, {manifest.split_mode} mode on {devices}"
        return Listing(title, ("", "name", "type", "shape"), rows)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fail(reference: weakref.ref[Session], error: BaseException) -> None:
    """End a session whose ranks can't go on. The reference is weak, so that ranks do not keep the session alive."""
    if (session := reference()) is not None:
        session._admission.fail(error)


def _make_threads(
    deployment: Deployment, broken: Callable[[BaseException], None], swap: Mapping[Device, SwapBuffer]
) -> Workers:
    """Ranks as threads, not yet started. For `swap` see Setup."""
    manifest, graphs = deployment.manifest, deployment.cuda_graphs
    ranks = list(enumerate(deployment.devices))
    backends = [make_backend_of(manifest, rank, device, deployment.threads, graphs) for rank, device in ranks]
    setups = [
        Setup(rank, deployment.package, manifest, swap.get(device), deployment.shares[rank]) for rank, device in ranks
    ]
    return Workers(setups, backends, broken, replays=graphs and backends[0].asynchronous)


def choose_devices(manifest: Manifest, asked: Sequence[str] | None) -> list[Device]:
    """The device of each rank. Raises MisuseError unless there is one for each, of a kind that the engines run on.

    For a package of replicas, the number of devices decides how many replicas there are.
    """
    devices, count = parse_devices(asked or manifest.devices), len(manifest.ranks)
    if len(devices) != count and not (manifest.replicas and len(devices) % count == 0):
        owner = "each replica of the package" if manifest.replicas else "the package"
        named = "1 device is" if len(devices) == 1 else f"{len(devices)} devices are"
        raise MisuseError(
            f"{owner} has {plural(count, 'rank')}, and {named} named for it: name one for each of them with -d"
        )
    choose_engine(manifest.engine, devices)
    return devices


def choose_shares(manifest: Manifest, count: int) -> list[float]:
    """The replicas' shares of a request's rows: the package's, or equal ones for another number of replicas."""
    shares = [replica.share for replica in manifest.replicas]
    return shares if len(shares) == count else [1.0] * count
