"""What all ranks of a session have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.manifest import Manifest


@dataclass(frozen=True)
class Deployment:
    """A package on devices, one a rank. `threads` are those of each CPU device; 0 leaves them to the ranks.

    With `cuda_graphs`, requests on GPUs are replayed where they can be. Of several replicas it is one, whose first rank
    has the number `first` in the session, whose devices are then `all_devices`.
    """

    package: Path
    manifest: Manifest
    devices: Sequence[Device]
    threads: int
    cuda_graphs: bool
    first: int = 0
    all_devices: Sequence[Device] = ()
