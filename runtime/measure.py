"""Measure what each rank really holds: one process a rank, so that no rank's memory hides in another's.

    python -m splitc.runtime.measure PACKAGE RANK THREADS INPUTS.npz OUTPUTS.npz

runs one rank on the inputs in the file, writes what the next ranks need, and prints its memory as JSON.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import psutil

from splitc.runtime.arrays import load_arrays, save_arrays
from splitc.runtime.engines.onnxruntime import OnnxRuntimeBackend
from splitc.runtime.errors import SplitcError
from splitc.runtime.manifest import Manifest, Rank, read_manifest
from splitc.runtime.program import Run


class RankMemory(msgspec.Struct, frozen=True):
    """Resident bytes of a rank's process above what it had before: with its engines loaded, and at its peak.

    The peak counts loading, and one run on the given feeds with their shapes.
    """

    device: str
    loaded: int
    peak: int
    predicted_weights: int
    predicted_total: int


def measure_memory(package: Path, threads: int, feeds: Mapping[str, npt.NDArray[Any]]) -> list[RankMemory]:
    """Run the ranks one after another, each in a process of its own. Raises SplitcError when one fails."""
    manifest = read_manifest(package)
    values: dict[str, npt.NDArray[Any]] = dict(feeds)
    found = []
    with tempfile.TemporaryDirectory(prefix="splitc-measure-") as folder:
        inputs, outputs = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        for number, rank in enumerate(manifest.ranks):
            wanted = {name for engine in rank.engines for name in engine.inputs}
            save_arrays(inputs, {name: array for name, array in values.items() if name in wanted})
            command = [
                sys.executable,
                "-m",
                __name__,
                str(package),
                str(number),
                str(threads),
                str(inputs),
                str(outputs),
            ]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                reason = result.stderr.strip().splitlines()[-1:] or ["no message"]
                raise SplitcError(f"can't measure the memory of rank {number} ({rank.device}): {reason[0]}")
            found.append(msgspec.json.decode(result.stdout, type=RankMemory))
            values.update(load_arrays(outputs))
    return found


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    """The most resident bytes that this process ever had."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage would count what the parent had when it forked.
        return next(
            int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM:")
        )
    import resource  # where there is no /proc: macOS, which counts in bytes

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _measure_rank(
    manifest: Manifest, rank: Rank, package: Path, threads: int, inputs: Path, outputs: Path
) -> RankMemory:
    arrays = load_arrays(inputs)
    backend = OnnxRuntimeBackend(threads)
    before = _resident()
    engines = [backend.load(package / engine.path) for engine in rank.engines]
    loaded = _resident()
    values: dict[str, Any] = {name: backend.upload(array) for name, array in arrays.items()}
    for step in rank.program:
        if isinstance(step, Run):
            values.update(engines[step.engine].run({name: values[name] for name in engines[step.engine].inputs}))
    peak = _peak()
    later = {name for other in manifest.ranks for engine in other.engines for name in engine.inputs}
    save_arrays(
        outputs, {n: np.asarray(backend.download(v)) for n, v in values.items() if n in later and n not in arrays}
    )
    return RankMemory(rank.device, max(0, loaded - before), max(0, peak - before), rank.weights_bytes, rank.total_bytes)


def main() -> None:
    package, number, threads, inputs, outputs = sys.argv[1:]
    manifest = read_manifest(Path(package))
    found = _measure_rank(
        manifest, manifest.ranks[int(number)], Path(package), int(threads), Path(inputs), Path(outputs)
    )
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
