"""Models on two hosts, under mpirun, compared with threads: tokens or outputs must be equal to the bit.

    python -m tests.benchmarks.mpi_tokens FOLDER WORK

FOLDER has a folder for each model, with model.onnx and inputs.npz. Packages for two CPU devices, in all split modes,
are kept in WORK. The hosts are network namespaces: see tests.helpers.mpi.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from tests.helpers.mpi import MPIS, TwoHosts, ended

PROMPT, TOKENS = [3, 1, 4, 1, 5], 8


def answers(package: str, inputs: str) -> dict[str, Any]:
    """The tokens after a prompt if the model is a decoder, else its outputs."""
    with Session(package, threads=1) as session:
        try:
            return {"tokens": list(session.generate(PROMPT, max_new_tokens=TOKENS))}
        except SplitcError:
            with np.load(inputs) as feeds:
                return dict(session.run(dict(feeds)))


def main(folder: Path, work: Path) -> int:
    """Returns the number of packages whose outputs differ."""
    differ = 0
    for model in sorted(folder.glob("*/model.onnx")):
        for mode in ("layer", "tensor", "row"):
            name, inputs = f"{model.parent.name}-{mode}", model.with_name("inputs.npz")
            try:
                if not (work / name).exists():
                    plan = plan_model(model, ["2xcpu"], Request(split_mode=mode))
                    compile_model(plan, work / name, verify=False)
                expected = answers(str(work / name), str(inputs))
            except SplitcError as error:
                print(f"{name}: refused: {str(error)[:100]}", flush=True)
                continue
            for mpi in MPIS:
                made = work / f"{name}.npz"
                made.unlink(missing_ok=True)
                command = sys.executable, "-m", "tests.benchmarks.mpi_tokens", "answer", work / name, inputs, made
                code, shown = ended(mpi.start(2, *command, hosts=TwoHosts()), 120)
                same = code == 0 and _same(made, expected)
                differ += not same
                what = "tokens" if "tokens" in expected else "a run"
                print(f"{name}: {mpi.name}: {what}: {'same' if same else shown or 'DIFFERENT'}", flush=True)
    return differ


def _same(made: Path, expected: dict[str, Any]) -> bool:
    with np.load(made) as found:
        return all(np.array_equal(found[key], value, equal_nan=True) for key, value in expected.items())


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        found = answers(*sys.argv[2:4])
        np.savez(sys.argv[4], **found)
    else:
        sys.exit(min(1, main(Path(sys.argv[1]), Path(sys.argv[2]))))
