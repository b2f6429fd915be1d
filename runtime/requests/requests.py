"""A session's requests, from checked feeds to joined outputs, and the numbers of its sequences."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NoReturn

from splitc.runtime.adapters.held import KeptSums
from splitc.runtime.adapters.loaded import Adapters
from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import MisuseError
from splitc.runtime.feeds.named_sizes import NamedSizes
from splitc.runtime.feeds.on_gpu import Feed
from splitc.runtime.feeds.rows import join_batches
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.requests.added_feeds import with_kept_rows, with_lengths
from splitc.runtime.requests.admission import Admission
from splitc.runtime.requests.empty_outputs import EmptyOutputs
from splitc.runtime.requests.outputs import DeviceArrays, OutputJoiner
from splitc.runtime.requests.preamble import PreambleEngine
from splitc.runtime.requests.replicas import Replicas


class Requests:
    """The private half of a session. The session sets `_admission` before the first request.

    - `ranks`: the kind of the ranks: see `choose_ranks`.
    - `_replicas`: divide requests, if there are several.
    - `_preamble`: runs before the ranks, if there is one.
    """

    _admission: Admission
    _replicas: Replicas | None = None
    _preamble: PreambleEngine | None = None

    def __init__(self, manifest: Manifest, devices: Sequence[Device], ranks: str) -> None:
        self.manifest = manifest
        self.devices = devices
        self.device_arrays = DeviceArrays(manifest, devices, ranks)
        self._joiner = OutputJoiner(manifest, devices)
        self._shared_sizes = NamedSizes(manifest.inputs, manifest.shared_sizes)
        self._empty_outputs = EmptyOutputs(manifest, devices)
        self._sequences = itertools.count()
        # Of sequences that were dropped without being closed, and of sums of adapters.
        self._dropped: deque[int] = deque()
        self.adapters = Adapters(manifest.slots, KeptSums(self._sequences, self._dropped, manifest.most_rank))

    def check_next(self, feeds: Mapping[str, Feed], sequence: int | None) -> None:
        """Raise what a sequence's next request would be refused with: of these feeds, with all that ranks have of it.

        Raises FeedError for sizes that ranks can't take, kept rows beyond the tokens, and another number of rows than
        the `sequence` began with, and MisuseError in a callback of a request.
        """
        self._shared_sizes.check(feeds)
        self._empty_outputs.check(feeds)
        with_kept_rows(self.manifest.kept_rows, feeds)
        if self._replicas is not None and sequence is not None:
            self._replicas.check_rows(sequence, feeds)
        self._admission.check_may_wait()

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            "a session can't be copied, or sent to another process: open one there, with the package's path"
        )

    def submit_request(self, request: InFlightRequest, here: bool = False) -> Future[InFlightRequest]:
        """Start a request with feeds that fit the inputs. Those of a sequence are checked: see `check_next`.

        With `here`, the calling thread reads the answers of processes, which is faster if it waits for the result
        anyway. Raises FeedError, MisuseError and SplitcError as `Session.run` does.
        """
        if request.on_device:
            self.device_arrays.check_outputs()
        if request.sequence is None:
            self._shared_sizes.check(request.feeds)
            self._empty_outputs.check(request.feeds)
        request.feeds = with_kept_rows(self.manifest.kept_rows, request.feeds)
        if self.manifest.lengths:
            request.given = request.feeds
            if request.sequence is None:
                request.feeds = with_lengths(self.manifest.lengths, request.feeds)
            if self._preamble is not None:
                request.feeds = self._preamble.apply(request.feeds, request.adapters is not None)
        self._forget_dropped()
        if self._replicas is not None:
            self._replicas.divide(request)
        return self._admission.submit(request, here)

    def _forget_dropped(self) -> None:
        while self._dropped:
            try:
                sequence = self._dropped.popleft()
            except IndexError:  # another thread may have taken the last one
                return
            self._admission.forget(sequence, reusable=False)

    def join(self, request: InFlightRequest) -> dict[str, Array]:
        """Join the ranks' outputs of a request: whole ones, sharded ones, outputs that are inputs, and rows."""
        if not request.parts:
            return self._joiner.join(request)
        joined = [self._joiner.join(part) for part in request.parts]
        return joined[0] if len(joined) == 1 else join_batches(joined, self.manifest.batch)

    def number_sequence(self) -> int:
        """A new sequence's number on the ranks."""
        return next(self._sequences)

    def forget(self, sequence: int, reusable: bool) -> None:
        """Free the states of a sequence. They are `reusable` by another one if none failed or grew."""
        self._admission.forget(sequence, reusable)

    def forget_later(self, sequence: int) -> None:
        """As `forget`, with the next request. May be called at any time, also by the garbage collector."""
        self._dropped.append(sequence)
