"""Prompts and tokens of an exported decoder, with caches in place and as exported, on one set of devices.

    python -m tests.gpu.exported decoder.onnx --devices cuda0
    python -m tests.gpu.exported decoder.onnx --devices cuda0 cuda1 --prompt 512 --tokens 60
    python -m tests.gpu.exported decoder.onnx --devices cpu0        # the same, without a GPU

The model comes from transformers' or optimum's exporter, in half precision for GPUs. Missing weights are made up. It is
compiled in layer mode for one device, and in tensor mode for several. A sequence runs a prompt twice, and then token
after token. Only the last token's logits of a prompt are computed, as in `generate`, if the package can choose.
`difference` is the largest difference of the last logits, relative to the largest of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.cli.terminal import out, table
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.units import format_bytes
from tests.gpu.made_weights import make_missing_weights

# Tokens before the timed ones: eager or captured.
FIRST = 6
# Values of --no-fuse. The first package also pays for loading the kernels of both.
WAYS = {"exported": True, "fused": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--devices", nargs="+", default=["cuda0"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options = parser.parse_args()
    make_missing_weights(options.model)
    rows = table("", "first prompt", "prompt", "token", "replayed", "difference", "loaded", "planned")
    reference = None
    with tempfile.TemporaryDirectory() as folder:
        for name in options.ways:
            request = Request(
                split_mode="tensor" if len(options.devices) > 1 else "layer",
                engine="onnxruntime",
                spread=True,
                no_fuse=WAYS[name],
            )
            package = Path(folder) / name
            compile_model(plan_model(options.model, options.devices, request), package, weights="link", verify=False)
            with Session(package, verify="never") as session:
                prompts, tokens, logits = _measure(session, options.prompt, options.tokens, options.capacity)
                replayed, memory = session.metrics.replayed, session.device_memory()
            reference = logits if reference is None else reference
            difference = float(np.abs(logits - reference).max() / np.abs(reference).max())
            rows.add_row(
                name,
                *(f"{1e3 * seconds:.2f} ms" for seconds in (prompts[0], prompts[-1], median(tokens[FIRST:]))),
                f"{replayed} of {2 * (1 + options.tokens)}",
                f"{difference:.1e}",
                *(", ".join(map(format_bytes, sizes)) for sizes in _loaded(memory)),
            )
    out.print(rows)


def _loaded(memory: Sequence[RankMemory]) -> tuple[list[int], list[int]]:
    """Each GPU's bytes after loading, measured and predicted."""
    return [rank.loaded for rank in memory], [rank.predicted_loaded for rank in memory]


def _measure(session: Session, prompt: int, count: int, capacity: int) -> tuple[list[float], list[float], np.ndarray]:
    """The seconds of each prompt, of the tokens after the last one, and the last token's logits."""
    rows = [t.role.rows for t in session.manifest.inputs if t.role is not None and t.role.kind == "indices"]
    ids = np.random.default_rng(0).integers(0, min(rows), (1, prompt + count))
    prompts, tokens = list[float](), list[float]()
    logits = np.zeros(0, np.float32)
    for _ in range(2):
        tokens.clear()
        with session.start(capacity) as sequence:
            past = 0
            for new in (prompt, *[1] * count):
                feeds = _feeds(session.manifest, ids[:, past : past + new], past)
                start = time.perf_counter()
                outputs = sequence.run(feeds)
                (tokens if past else prompts).append(time.perf_counter() - start)
                past += new
            logits = np.asarray(next(iter(outputs.values())))[0, -1].astype(np.float32)
    return prompts, tokens, logits


def _feeds(manifest: Manifest, ids: np.ndarray, past: int) -> dict[str, np.ndarray]:
    """A feed by its input's role: positions, a mask of all tokens, or the new tokens."""
    states = {state.input for state in manifest.states}
    made: dict[str, np.ndarray] = {}
    for tensor in manifest.inputs:
        kind = None if tensor.role is None else tensor.role.kind
        if tensor.name in states:
            continue
        made[tensor.name] = ids
        if kind == "positions":
            made[tensor.name] = np.arange(past, past + ids.shape[1])[None]
        elif kind == "mask":
            made[tensor.name] = np.ones((1, past + ids.shape[1]), np.int64)
    if manifest.kept_rows is not None:
        made[manifest.kept_rows.input] = np.array([-1])
    return made


if __name__ == "__main__":
    main()
