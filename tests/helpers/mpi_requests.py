"""A program for mpirun: it opens one package after the other, and writes what came of each to FOLDER.

python -m tests.helpers.mpi_requests FOLDER PACKAGE...: FOLDER/feeds.npz has the inputs. An error is printed.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from splitc.runtime import Session
from splitc.runtime.errors import SplitcError

PROMPT = [5, 17, 33]
# Requests in flight.
REQUESTS = 3


def main(folder: str, *packages: str) -> None:
    with np.load(f"{folder}/feeds.npz") as loaded:
        feeds = dict(loaded)
    for number, package in enumerate(packages):
        try:
            with Session(package, threads=1) as session:
                futures = [session.submit(feeds) for _ in range(REQUESTS)]
                outputs, *others = [future.result() for future in futures]
                assert all(np.array_equal(each[name], outputs[name]) for each in others for name in outputs)
                tokens = list(session.generate(PROMPT, max_new_tokens=8))
            made: dict[str, Any] = {"tokens": tokens, **outputs}
            np.savez(f"{folder}/{number}.npz", **made)
        except SplitcError as error:
            print(f"{number}: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
