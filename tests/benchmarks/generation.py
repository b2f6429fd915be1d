"""Tokens per second of packages in each split mode, compared with a plain loop of the unsplit model with IO binding.

    python -m tests.benchmarks.generation MODEL.onnx --tokens 200 --threads 2

Package and loop have the same total number of threads, and take turns. The times of the first and the last tokens
show what the growing cache costs. All must give the same tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.engines.onnxruntime_cpu import open_session
from splitc.runtime.generate.feeder import Feeder
from splitc.runtime.generate.signature import find_signature
from splitc.runtime.package.manifest import Manifest

# Tokens at both ends whose median is taken.
ENDS = 20


def plain_loop(model: ort.InferenceSession, manifest: Manifest, prompt: list[int], count: int) -> tuple[list[int], Any]:
    """Greedy tokens and the seconds of each. Presents are bound as pasts, and only the logits are read."""
    signature = find_signature(manifest)
    feeder = Feeder(manifest, signature)
    inputs = {tensor.name: tensor for tensor in manifest.inputs}
    cache: dict[str, Any] = {}
    for state in manifest.states:
        tensor = inputs[state.input]
        sizes = [0 if axis == state.grows else size for axis, size in enumerate(tensor.shape or ())]
        shape = [size if isinstance(size, int) else 1 for size in sizes]
        cache[state.input] = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, tensor.dtype))
    tokens, new, seconds = list(prompt), list(prompt), []
    outputs = [tensor.name for tensor in manifest.outputs]
    for _ in range(count):
        start = time.perf_counter()
        binding = model.io_binding()
        for name, array in feeder.feeds(new, len(tokens)).items():
            binding.bind_cpu_input(name, array)
        for name, value in cache.items():
            binding.bind_ortvalue_input(name, value)
        for name in outputs:
            binding.bind_output(name)
        model.run_with_iobinding(binding)
        results = dict(zip(outputs, binding.get_outputs()))
        cache = {state.input: results[state.output] for state in manifest.states}
        new = [int(results[signature.logits].numpy()[0, -1].argmax())]
        tokens += new
        seconds.append(time.perf_counter() - start)
    return tokens[len(prompt) :], np.array(seconds)


def package_loop(session: Session, prompt: list[int], count: int) -> tuple[list[int], Any]:
    """The same with a package."""
    tokens, seconds = [], []
    start = time.perf_counter()
    for token in session.generate(prompt, max_new_tokens=count):
        tokens.append(token)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return tokens, np.array(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    prompt = np.random.default_rng(0).integers(5, 100, options.prompt).tolist()
    with tempfile.TemporaryDirectory(prefix="splitc-generation-") as folder:
        sessions: dict[str, Session] = {}
        for mode in ("layer", "tensor"):
            plan = plan_model(options.model, [f"{options.threads}xcpu"], Request(split_mode=mode))
            compile_model(plan, Path(folder) / mode)
            sessions[mode] = Session(Path(folder) / mode, threads=1)
        manifest = sessions["layer"].manifest
        wholes = {threads: open_session(options.model, threads) for threads in sorted({1, options.threads})}
        runs: dict[str, Callable[[], tuple[list[int], Any]]] = {
            f"unsplit, {threads} threads": partial(plain_loop, whole, manifest, prompt, options.tokens)
            for threads, whole in wholes.items()
        }
        for mode, session in sessions.items():
            runs[f"{mode}, {options.threads} x 1"] = partial(package_loop, session, prompt, options.tokens)
        found: dict[str, list[Any]] = {name: [] for name in runs}
        tokens: dict[str, list[int]] = {}
        for _ in range(options.rounds):
            for name, run in runs.items():
                tokens[name], seconds = run()
                found[name].append(seconds[1:])  # the first has the prompt in it
        for name, rounds in found.items():
            seconds = np.median(np.array(rounds), axis=0)
            same = tokens[name] == next(iter(tokens.values()))
            print(
                f"{name:20} {1 / seconds.mean():7.1f} tokens/s   first {1e3 * np.median(seconds[:ENDS]):6.2f} ms   "
                f"last {1e3 * np.median(seconds[-ENDS:]):6.2f} ms   same tokens: {same}"
            )
        for session in sessions.values():
            session.close()


if __name__ == "__main__":
    main()
