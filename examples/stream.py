"""Requests that stream: while one is in the second stage, the next one is in the first."""

import argparse
import time

import numpy as np

from splitc.runtime import Session

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("package")
parser.add_argument("--requests", type=int, default=32)
parser.add_argument("--in-flight", type=int, default=4)
options = parser.parse_args()


def request(number: int) -> dict[str, np.ndarray]:
    """The feeds of a request, each with another length."""
    ids = np.arange(number % 7 + 2)[None] % 10
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}


with Session(options.package, in_flight=options.in_flight) as session:
    for count in (1, options.in_flight):
        start = time.perf_counter()
        lengths = [o["logits"].shape[1] for o in session.map(map(request, range(options.requests)), in_flight=count)]
        assert lengths == [number % 7 + 2 for number in range(options.requests)], "in order"
        print(f"{count} in flight: {options.requests / (time.perf_counter() - start):.0f} requests a second")
