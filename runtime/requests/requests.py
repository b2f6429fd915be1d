"""A session's requests, from checked feeds to joined outputs, and the numbers of its sequences."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from splitc.runtime.arrays.array import Array
from splitc.runtime.feeds.checks import check_sizes
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.ranks.request import InFlightRequest
from splitc.runtime.requests.admission import Admission
from splitc.runtime.requests.device_arrays import DeviceArrays
from splitc.runtime.requests.lengths import with_lengths
from splitc.runtime.requests.outputs import OutputJoiner


class Requests:
    """What a session does below its public methods. It sets `_admission` before the first request.

    `ranks` says what ranks are: see `choose_ranks`.
    """

    _admission: Admission

    def __init__(self, manifest: Manifest, devices: Sequence[Device], ranks: str) -> None:
        self.manifest = manifest
        self.devices = devices
        self.device_arrays = DeviceArrays(manifest, devices, ranks)
        self._joiner = OutputJoiner(manifest, devices)
        self._sequences = itertools.count()
        # Of sequences that were dropped without being closed.
        self._dropped: deque[int] = deque()

    def submit_request(self, request: InFlightRequest, here: bool = False) -> Future[InFlightRequest]:
        """Start a request with checked feeds.

        With `here`, the calling thread reads the answers of processes, which is faster if it waits for the result
        anyway. Raises FeedError, MisuseError and SplitcError as `Session.run` does.
        """
        if request.on_device:
            self.device_arrays.check_outputs()
        check_sizes(request.feeds, self.manifest)
        if request.sequence is None and self.manifest.lengths:
            request.given = request.feeds
            request.feeds = with_lengths(self.manifest.lengths, request.feeds)
        self._forget_dropped()
        return self._admission.submit(request, here)

    def _forget_dropped(self) -> None:
        while True:
            try:
                sequence = self._dropped.popleft()
            except IndexError:  # another thread may have taken the last one
                return
            self._admission.forget(sequence, reusable=False)

    def join(self, request: InFlightRequest) -> dict[str, Array]:
        """Join the ranks' outputs of a request: whole ones, sharded ones, and outputs that are inputs."""
        return self._joiner.join(request)

    def number_sequence(self) -> int:
        """The number of another sequence on the ranks."""
        return next(self._sequences)

    def forget(self, sequence: int, reusable: bool) -> None:
        """Free the states of a sequence. They are `reusable` by another one if none failed or grew."""
        self._admission.forget(sequence, reusable)

    def forget_later(self, sequence: int) -> None:
        """As `forget`, with the next request. May be called at any time, also by the garbage collector."""
        self._dropped.append(sequence)
