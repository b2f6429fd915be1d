"""A sequence of requests, whose states stay on the ranks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from splitc.runtime.adapters.held import HeldSum
from splitc.runtime.arrays.array import Array, Zeros, number_type
from splitc.runtime.errors import EngineError, FeedError, MisuseError, SplitcError
from splitc.runtime.feeds.checks import Inputs
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.requests.added_feeds import added, check_lengths, filled_rows, length_feeds, lengthened
from splitc.runtime.requests.empty_states import count_batch, empty_states
from splitc.runtime.requests.masks import find_cache_masks
from splitc.runtime.requests.requests import Requests
from splitc.runtime.threads.interrupts import later_interrupts
from splitc.runtime.units import first_few, whole_number

# The largest capacity, in tokens.
MOST_CAPACITY = (1 << 31) - 1


class StateSequence:
    """Requests that follow each other, made by `Session.start`.

        with session.start() as sequence:
            outputs = sequence.run({"input_ids": prompt, ...})
            outputs = sequence.run({"input_ids": next_token, ...})

    States are neither fed nor returned: they begin as zeros (caches with length 0), and stay on the ranks. A state that
    one rank makes and another one takes is carried by this object. Several sequences may be open at once.

    A sequence is for one thread at a time: while a request runs, `run`, `load` and `grow` of another thread raise
    MisuseError, and `close` frees the states when the request has ended.
    """

    def __init__(self, session: Requests, capacity: int | None, adapters: HeldSum | None) -> None:
        self._session = session
        self._adapters = adapters
        self._capacity = None if capacity is None else _check_capacity(capacity)
        manifest = session.manifest
        resident = {state.input for state in manifest.resident_states}
        self._carries = [state for state in manifest.states if state.input not in resident]
        inputs = {state.input for state in manifest.states}
        self._given = [tensor for tensor in manifest.inputs if tensor.name not in inputs]
        self._fed = Inputs(self._given, manifest.omittable, manifest.fixed)
        self._states = [tensor for tensor in manifest.inputs if tensor.name in inputs]
        self._outputs = {state.output for state in manifest.states}
        self._masks = find_cache_masks(manifest)
        self._carried: dict[str, Array] = {}
        self._loaded: dict[str, Array] = {}
        # Feeds that are the same in all requests: until the first one, and their shapes, in arrays without memory.
        self._constant: dict[str, Array] = {}
        self._held: dict[str, Array] = {}
        self._counted = {length.reads[0] for length in manifest.lengths if length.reads is not None}
        if manifest.kept_rows is not None:
            self._counted.add(manifest.kept_rows.reads[0])
        # The numbers that the ranks know the sequence by, the latest last: none before its first request, and two while
        # it grows.
        self._numbers: list[int] = []
        # The filled rows of caches that are written in place, by the inputs that say so.
        self._filled = {length.input: 0 for length in manifest.lengths}
        # The tokens in the model's own caches, as its masks count them.
        self._tokens = 0
        # The capacity of its states on the ranks.
        self._allocated: int | None = None
        # The requests in which its states grew on the ranks.
        self._growth = 0
        # A sequence that is dropped without being closed: its session frees the states.
        self._end = weakref.finalize(self, _drop, weakref.ref(session), self._numbers)
        self._end.atexit = False
        self._busy = threading.Lock()
        self._failed = self._closed = False

    @property
    def usable(self) -> bool:
        """Whether it can run: no run failed, and it is not closed. A request that is refused changes nothing."""
        return not (self._failed or self._closed)

    def run(self, feeds: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Run the model on the feeds, which have no states. Returns the outputs that are not states.

        A mask is of the tokens so far, those in the caches included. Raises FeedError for feeds that do not fit the
        model, MisuseError for more tokens than the capacity and while another thread uses the sequence, EngineError if
        an engine fails, SplitcError after a failed run or after `close`.
        """
        with self._alone():
            if self._failed:
                raise SplitcError("a run of this sequence failed, so its states are lost: start another one")
            given = self._fed.on_host(feeds)
            tokens = self._masks.count(given, self._tokens)
            arrays = self._masks.with_room(given, self._capacity)
            filled = self._fill(arrays)
            known = {**self._loaded, **self._held, **self._carried, **given}
            self._session.check_next(known, self._numbers[-1] if self._numbers else None)
            self._failed = True  # until the end: whatever comes between may leave states that nobody knows
            request = self._next_request(arrays)
            try:
                self._session.submit_request(request, here=True).result()
            except EngineError as error:
                raise self._with_sizes(error, given) from error
            outputs = self._session.join(request)
            self._growth += any(execution.grew for execution in request.executions.values())
            if request.after is not None:
                self._numbers.remove(request.after)
                self._session.forget(request.after, reusable=not self._growth)
            self._carried = {state.input: outputs[state.output] for state in self._carries}
            self._filled, self._tokens = filled, tokens
            self._failed = False
            return {name: array for name, array in outputs.items() if name not in self._outputs}

    def _next_request(self, arrays: Mapping[str, Array]) -> InFlightRequest:
        """The request that begins the sequence, moves it to larger states, or continues with the present ones."""
        initial: Mapping[str, Array | Zeros] = {}
        manifest, after, room = self._session.manifest, None, self._room()
        if not self._numbers:
            initial = self._begin(arrays, room)
        elif self._capacity != self._allocated and (initial := self._lengthen(arrays, room)):
            after = self._numbers[-1]
        if not self._numbers or after is not None:
            # One that has grown is another sequence to the ranks: a failure leaves the one before as it was.
            self._numbers.append(self._session.number_sequence())
        self._allocated = self._capacity
        return InFlightRequest(
            {
                **arrays,
                **self._carried,
                **length_feeds(
                    manifest.lengths, count_batch(manifest, arrays), self._filled, arrays, self._capacity or 0
                ),
            },
            sequence=self._numbers[-1],
            initial=initial,
            in_place=self._capacity is not None,
            after=after,
            growth=self._growth,
            adapters=self._adapters,
        )

    def _with_sizes(self, error: EngineError, given: Mapping[str, Array]) -> EngineError:
        """The error of a request, with its sizes: a mask of too few tokens is an engine's error.

        If it names a cache with a capacity, that is added too: it may be too small.
        """
        sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in given.items())
        before = f", after {max(self._filled.values())} tokens" if self._filled else ""
        text = f"{error}\nThe request had {sizes}{before}"
        caches = [state.output for state in self._session.manifest.states if state.in_place]
        if self._capacity is not None and any(name in str(error) for name in caches):
            text += (
                f"\nThe sequence has room for {self._capacity} tokens. For more, start it with a larger capacity, "
                "or let it grow()"
            )
        return EngineError(text)

    def _room(self) -> dict[str, int]:
        """The capacity in tokens of the states that are written in place; none if a request allocates longer ones."""
        if self._capacity is None:
            return {}
        growing = [state.input for state in self._session.manifest.states if state.in_place and state.grows is not None]
        return dict.fromkeys(growing, self._capacity)

    def _fill(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """The filled rows of the caches after a request.

        Raises FeedError for a request that the engines can't run, MisuseError if it exceeds the capacity.
        """
        filled, manifest = dict(self._filled), self._session.manifest
        check_lengths(manifest.lengths, count_batch(manifest, feeds), filled, feeds)
        for length in manifest.lengths:
            filled[length.input] = total = filled[length.input] + added(length, feeds)
            if self._capacity is not None and total > self._capacity:
                raise MisuseError(
                    f"the sequence has room for {self._capacity} tokens, and comes to {total}: start it with a larger "
                    "capacity, or let it grow()"
                )
        return filled

    def load(self, states: Mapping[str, npt.ArrayLike]) -> None:
        """Begin with these states instead of zeros, by the names of their inputs. Only before the first run.

        The arrays are copied; with a capacity, caches that are written in place get room behind their tokens. Raises
        FeedError for states that do not fit the model, MisuseError for more tokens than the capacity, and while another
        thread uses the sequence, SplitcError after a run or after `close`.
        """
        with self._alone():
            if self._numbers:
                raise SplitcError("states can be loaded before the first run only")
            loaded, manifest = Inputs(self._states).on_host(states, copy=True), self._session.manifest
            filled = {length.input: filled_rows(length, loaded) for length in manifest.lengths}
            growing = [(state.input, state.grows) for state in manifest.states]
            sizes = {name: loaded[name].shape[axis] for name, axis in growing if axis is not None}
            if too_long := [sizes[name] for name, room in self._room().items() if sizes[name] > room]:
                raise MisuseError(
                    f"the states have {max(too_long)} tokens, and the sequence has room for {self._capacity}"
                )
            self._loaded, self._filled, self._tokens = loaded, filled, max(sizes.values(), default=0)

    def hold(self, feeds: Mapping[str, npt.ArrayLike]) -> None:
        """Give the ranks feeds that are the same in all requests, such as an encoder's outputs for a decoder.

        They go with the first request and stay on the ranks: no `run` is given them again. Raises FeedError for feeds
        that do not fit the model, for those that are held already, and for inputs whose tokens are counted in each
        request; MisuseError while another thread uses the sequence, SplitcError after a run or after `close`.
        """
        with self._alone():
            if self._numbers:
                raise SplitcError("a sequence's constant inputs must be given before its first run")
            may_be_held = {tensor.name: tensor for tensor in self._given if tensor.name not in self._counted}
            if wrong := [name for name in feeds if name not in may_be_held]:
                those = f"each of these inputs once: {first_few([*may_be_held])}" if may_be_held else "no further input"
                raise FeedError(f"a sequence can't hold '{wrong[0]}': it may hold {those}")
            constant = Inputs([may_be_held[name] for name in feeds]).on_host(feeds, copy=True)
            self._constant.update(constant)
            self._held.update({n: np.broadcast_to(np.zeros((), a.dtype), a.shape) for n, a in constant.items()})
            manifest = self._session.manifest
            self._given = [tensor for tensor in self._given if tensor.name not in feeds]
            self._fed = Inputs(self._given, manifest.omittable, manifest.fixed)

    def grow(self, capacity: int) -> None:
        """Raise the caches' capacity to this number of tokens, with the next run, which copies them once.

        Raises MisuseError unless the sequence was started with a smaller capacity, and while another thread uses it;
        SplitcError after `close`.
        """
        with self._alone():
            if self._capacity is None:
                raise MisuseError("this sequence has no capacity that could grow: begin it with start(capacity=...)")
            if (capacity := _check_capacity(capacity)) < self._capacity:
                raise MisuseError(f"a sequence with a capacity of {self._capacity} can't grow to {capacity}")
            self._capacity = capacity

    def _lengthen(self, feeds: Mapping[str, Array], room: Mapping[str, int]) -> Mapping[str, Zeros]:
        """The longer states that the ranks copy theirs to. Carried states are padded here."""
        zeros = empty_states(self._session.manifest, feeds, room)
        self._carried.update(self._with_room({n: array for n, array in self._carried.items() if n in room}, room))
        return {name: zeros[name] for name in room if name not in self._carried}

    def _with_room(self, states: Mapping[str, Array], room: Mapping[str, int]) -> dict[str, Array]:
        """States padded with zeros to this room."""
        grows = {state.input: state.grows for state in self._session.manifest.states}
        axes = {name: axis for name in states if (axis := grows[name]) is not None}
        return {name: lengthened(states[name], axis, room[name]) for name, axis in axes.items()}

    def _begin(self, feeds: Mapping[str, Array], room: Mapping[str, int]) -> dict[str, Array | Zeros]:
        """The sequence's initial values on the ranks. Carried states begin here."""
        loaded = {**self._loaded, **self._with_room({n: a for n, a in self._loaded.items() if n in room}, room)}
        begun: Mapping[str, Array | Zeros] = loaded or empty_states(
            self._session.manifest, {**feeds, **self._constant}, room
        )
        for state in self._carries:
            first = begun[state.input]
            self._carried[state.input] = (
                np.zeros(first.shape, number_type(first.dtype)) if isinstance(first, Zeros) else first
            )
        resident = {name: state for name, state in begun.items() if name not in self._carried}
        constant, self._constant, self._loaded = self._constant, {}, {}
        return {**resident, **constant}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other threads. Raises MisuseError if one uses the sequence, SplitcError if it is closed."""
        entered = False
        try:
            with later_interrupts():  # one that came as it is entered would leave it locked
                if not self._busy.acquire(blocking=False):
                    raise MisuseError(
                        "another thread uses this sequence, whose requests follow each other: wait for it"
                    )
                entered = True
            if self._closed:
                raise SplitcError("this sequence is closed, and its states are gone: start another one")
            yield
        finally:
            if entered:
                self._busy.release()
                self._free_if_closed()

    def close(self) -> None:
        """Free the states, after a request that another thread runs. The sequence can't run any more."""
        self._closed = True
        self._free_if_closed()

    def _free_if_closed(self) -> None:
        with later_interrupts():  # the ranks free all, or none
            if self._closed and self._busy.acquire(blocking=False):
                self._carried, self._loaded, self._constant = {}, {}, {}
                try:
                    while self._numbers:
                        self._session.forget(self._numbers.pop(), reusable=not self._failed and not self._growth)
                    self._end.detach()  # or Python runs it as this is freed, where it drops interrupts
                finally:
                    self._busy.release()

    def __enter__(self) -> StateSequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop(reference: weakref.ref[Requests], numbers: list[int]) -> None:
    if (session := reference()) is not None:
        for number in numbers:
            session.forget_later(number)


def _check_capacity(capacity: int) -> int:
    """The capacity. Raises MisuseError if it is not a valid number of tokens."""
    return whole_number("--capacity", capacity, 1, MOST_CAPACITY, of=" of tokens")
