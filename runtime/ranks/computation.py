"""One rank's computation for a request: from feeds to outputs. The states of a sequence stay on the rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

from splitc.runtime.adapters.held import HeldSum, shards_of
from splitc.runtime.arrays.array import Allocate, Array, Zeros
from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.engines import Backend
from splitc.runtime.errors import EngineError
from splitc.runtime.feeds.on_gpu import Feed, GpuFeed
from splitc.runtime.gpu.array import GpuArray
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.package.parts import cut_part, cut_places, part_shape
from splitc.runtime.package.states import State
from splitc.runtime.ranks.loaded import EngineForms, LoadedRank, Setup
from splitc.runtime.ranks.loop import Span, execute
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.units import format_bytes

# A function that waits for a request's outputs and returns them; when each step ran; whether a state grew.
Ran = tuple[Callable[[], dict[str, Array]], list[Span], bool]


class Computation:
    """A rank's part of requests, on the thread of its `backend`.

    - `resident`: the states that stay on this rank: the output of each, by its input.
    - `sequences`: the states of each sequence.
    - `allocate`: returns the arrays that a GPU writes outputs to, if given.
    """

    def __init__(
        self, setup: Setup, loaded: LoadedRank, backend: Backend, collectives: Collectives, allocate: Allocate | None
    ) -> None:
        self.rank = setup.rank
        self.backend = backend
        self.collectives = collectives
        self.allocate = allocate
        self._program = loaded.program
        stays = [state for state in setup.manifest.resident_states if state.input in self.rank.inputs]
        self.resident = {state.input: state.output for state in stays}
        self._in_place = {state.input: state for state in stays if state.in_place}
        self._fixed = {name: state for name, state in self._in_place.items() if state.grows is None}
        self._masks = setup.manifest.masks
        self._parts = {part.name: part for part in self.rank.parts}
        self._overrides = {override.value: override for override in self.rank.overrides}
        self._cut = self._parts.keys() | self._overrides.keys()
        self.sequences: dict[int | None, dict[str, Any]] = {}
        # A and B of the sums of adapters, as the engines take them, by the sums' numbers.
        self.adapters: dict[int, Mapping[str, Any]] = {}

    def run(self, request: InFlightRequest) -> Ran:
        """Run the program eagerly."""
        before = self.sequences.get(request.sequence)
        states = self._begin_states(request) if before is None else before
        values, spans = self.execute(request, states, partial(self._upload, request))
        grew = False
        if request.sequence is not None:
            kept = {n: self.backend.persist_state(values[output], states.get(n)) for n, output in self.resident.items()}
            kept.update({name: value for name, value in states.items() if name not in self.resident})
            # Only GPUs, whose work is recorded, have to know.
            grew = self.backend.asynchronous and not all(
                name in states and kept[name].shape == states[name].shape for name in self.resident
            )
            self.sequences[request.sequence] = kept
        given = {name: values[name] for name in self.given(request)}
        return self._fetch(request, given, self.allocate), spans, grew

    def run_aside(self, request: InFlightRequest, states: Mapping[str, Any]) -> dict[str, Array]:
        """The outputs of the request, without a change to its sequence's states.

        States in place are written, with the values that the request will write again.
        """
        values, _ = self.execute(request, states, partial(self._upload, request))
        return self._fetch(request, {name: values[name] for name in self.given(request)}, None)()

    def _fetch(
        self, request: InFlightRequest, values: Mapping[str, Any], allocate: Allocate | None
    ) -> Callable[[], dict[str, Array]]:
        if not request.on_device:
            return self.backend.fetch(values, allocate)
        assert isinstance(self.backend, GpuDevice), "a session asks for that where all ranks have GPUs"
        return hand_over(self.backend, values)

    def hold_states(self, request: InFlightRequest, states: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of a sequence's states, except those that are written in place."""
        assert isinstance(self.backend, GpuDevice), "others record nothing"
        held = states.keys() & self._replaced(request)
        return {name: self.backend.copy_of(states[name]) for name in sorted(held)}

    def _replaced(self, request: InFlightRequest) -> Set[str]:
        """The states that the request's outputs replace, rather than being written in place."""
        return self.resident.keys() - self._overwritten(request).keys()

    def _overwritten(self, request: InFlightRequest) -> dict[str, State]:
        """The states that the request writes in place: those with their full capacity, as fixed ones always have.

        Without a sequence, states are the caller's arrays.
        """
        if request.in_place:
            return self._in_place
        return self._fixed if request.sequence is not None else {}

    def _begin_states(self, request: InFlightRequest) -> dict[str, Any]:
        """The initial states of a sequence on this rank: zeros, and constant feeds.

        Or, in longer arrays, the states of the sequence that it continues.
        """
        if not request.initial and request.after is None:
            return {}
        made = self.backend.zeros(self._zeros_of(request))
        if request.after is None:
            stay = request.initial.keys() - made.keys() - self._replaced(request)
            held = [name for name in self.rank.inputs if name in stay]
            # A copy, since the memory of a request's arrays may be another one's later.
            return {**made, **{name: self.backend.upload(self._cut_feed(name, request).copy()) for name in held}}
        before = self.sequences.get(request.after, {})
        for name, longer in made.items():
            axis = self._in_place[name].grows
            assert axis is not None
            self.backend.copy_front(before[name], longer, axis)
        return {**before, **made}

    def execute(
        self, request: InFlightRequest, states: Mapping[str, Any], upload: Callable[[str], Any]
    ) -> tuple[dict[str, Any], list[Span]]:
        """Run the program on the rank's states, and on other inputs that `upload` makes by name."""
        into: dict[str, Any] = {}

        def feeds() -> dict[str, Any]:
            held = self._hold(request.adapters)  # first: whatever else fails, the next request finds them
            left_out = self._masks - request.feeds.keys()
            taken = [name for name in self.rank.inputs if name not in left_out]
            fed = {name: states[name] if name in states else upload(name) for name in taken}
            fed.update(
                {value: upload(value) for value, override in self._overrides.items() if override.input in request.feeds}
            )
            fed.update(held)
            into.update({state.output: fed[name] for name, state in self._overwritten(request).items()})
            return fed

        return execute(self._program, self.collectives, feeds, into)

    def _hold(self, asked: HeldSum | None) -> Mapping[str, Any]:
        """This rank's shards of a sum of adapters. They stay on the device from the first request with this sum.

        Raises EngineError if that request failed, and this one comes without the arrays.
        """
        if asked is None:
            return {}
        if asked.number not in self.adapters:
            if not asked.arrays:
                raise EngineError("the adapters did not reach this rank, since an earlier request failed: try again")
            # Copies, since the memory of a request's arrays may be another one's later.
            shards = shards_of(asked.arrays, self.rank)
            self.adapters[asked.number] = {name: self.backend.upload(array.copy()) for name, array in shards.items()}
        return self.adapters[asked.number]

    def check_capturable(self, request: InFlightRequest) -> None:
        """Raise EngineError if the engine forms for this request, which are loaded late, can't be captured."""
        own = {*request.feeds, *(self.adapters[request.adapters.number] if request.adapters is not None else ())}
        for engine in self._program.engines:
            if isinstance(engine, EngineForms) and (why := engine.blocker(own)):
                raise EngineError(why)

    def forget(self, number: int) -> None:
        """Free the states of the sequence, or the sum of adapters, with this number."""
        self.sequences.pop(number, None)
        self.adapters.pop(number, None)

    def given(self, request: InFlightRequest) -> list[str]:
        """The outputs that the rank returns to the caller, and does not keep as states."""
        kept = set(self.resident.values()) if request.sequence is not None else set[str]()
        return [name for name in self.rank.outputs if name not in kept]

    def _upload(self, request: InFlightRequest, name: str) -> Any:
        """The backend's value for an input: the initial value of a state, or a feed."""
        feed = self.feed_of(name, request)
        if isinstance(feed, GpuFeed):
            assert isinstance(self.backend, GpuDevice), "a session brings it to the host otherwise"
            return self.backend.take(feed)
        return self.backend.upload(feed)

    def _zeros_of(self, request: InFlightRequest) -> dict[str, Zeros]:
        """This rank's shards of the states that begin as zeros, by the names of their inputs."""
        zeros = {name: state for name, state in request.initial.items() if isinstance(state, Zeros)}
        parts = {name: self._parts.get(name) for name in self.rank.inputs if name in zeros}
        return {
            name: zeros[name] if part is None else Zeros(part_shape(zeros[name].shape, part), zeros[name].dtype)
            for name, part in parts.items()
        }

    def feed_of(self, name: str, request: InFlightRequest) -> Feed:
        """As `_cut_feed`. A feed on a GPU is returned unchanged: it is never sharded, and replaces no weight."""
        feed = request.feeds.get(name)
        if feed is None or name in self._cut or name in request.initial:
            return self._cut_feed(name, request)
        return feed

    def _cut_feed(self, name: str, request: InFlightRequest) -> Array:
        """This rank's shard of a feed or of a state's initial array, by the name of the input.

        For an optional input, by the name of the weight that it replaces. The arrays are on the host.
        """
        if name in self._overrides:
            array: Feed | Zeros = request.feeds[self._overrides[name].input]
            assert not isinstance(array, GpuFeed | Zeros)
            return cut_places(array, self._overrides[name].places)
        array = request.initial[name] if name in request.initial else request.feeds[name]
        assert not isinstance(array, GpuFeed | Zeros)
        part = self._parts.get(name)
        return array if part is None else cut_part(array, part)


def hand_over(gpu: GpuDevice, values: Mapping[str, GpuArray]) -> Callable[[], dict[str, Any]]:
    """Begin to copy arrays to new CuPy arrays. Returns a function that waits, on any thread, and returns these by name.

    Their memory belongs to the default stream, like that of the caller's own arrays. Memory of the rank's stream would
    be reused as soon as the caller drops the arrays, while work that the caller has launched may still read them.
    Raises EngineError if there is not enough memory.
    """
    if not values:
        return dict
    with gpu.device:
        own, default = gpu.cuda.get_current_stream(), gpu.cuda.Stream.null
        default.use()
        try:
            made = _allocate(gpu, values)
            free = gpu.cuda.Event(disable_timing=True)
            free.record(default)
        finally:  # as a context manager, the default stream would stay the current one, for captures too
            own.use()
        gpu.stream.wait_event(free)
        for name, value in values.items():
            gpu.copy_over(GpuArray(made[name].data.ptr, value.shape, value.dtype, made[name]), value)
        gpu.keep(*made.values())  # even if a wait fails, the stream may still write to them
        done = gpu.record()

    def wait() -> dict[str, Any]:
        gpu.wait(done)
        return made

    return wait


def _allocate(gpu: GpuDevice, values: Mapping[str, GpuArray]) -> dict[str, Any]:
    """CuPy's own arrays of these sizes, of the current stream."""
    try:
        return {name: gpu.cupy.empty(value.shape, value.dtype) for name, value in values.items()}
    except MemoryError as error:  # CuPy's derives from it
        size = format_bytes(sum(value.nbytes for value in values.values()))
        raise EngineError(
            f"{gpu.name} has no memory left for {size} of outputs that are to stay there: drop outputs of earlier "
            "requests, or run without on_device"
        ) from error
