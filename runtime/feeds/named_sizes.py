"""Sizes with one name in a model, and feeds that contradict it.

Two sizes for one name need not be wrong: exporters give one name to sizes that a model never compares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from splitc.runtime.errors import EngineError, FeedError, SizesError
from splitc.runtime.feeds.on_gpu import Feed
from splitc.runtime.package.manifest import Tensor


class NamedSizes:
    """The axes of each symbol in the inputs' shapes, or only of these `symbols`."""

    def __init__(self, inputs: Sequence[Tensor], symbols: Collection[str] | None = None) -> None:
        places = defaultdict[str, list[tuple[str, int]]](list)
        for tensor in inputs:
            for axis, symbol in enumerate(tensor.shape or ()):
                if isinstance(symbol, str) and (symbols is None or symbol in symbols):
                    places[symbol].append((tensor.name, axis))
        sums = {symbol: terms for symbol in places if len(terms := symbol.split(" + ")) > 1}
        self._sums = {symbol: terms for symbol, terms in sums.items() if all(term in places for term in terms)}
        summed = {*self._sums, *(term for terms in self._sums.values() for term in terms)}
        self._places = {symbol: own for symbol, own in places.items() if len(own) > 1 or symbol in summed}

    def contradiction(self, arrays: Mapping[str, Feed]) -> str:
        """How the arrays, which fit the inputs, contradict the names; empty if they don't."""
        known: dict[str, tuple[int, str]] = {}
        for symbol, places in self._places.items():
            for name, axis in places:
                if name in arrays:
                    size = arrays[name].shape[axis]
                    first, other = known.setdefault(symbol, (size, name))
                    if first != size:
                        return f"'{symbol}' is {first} in the input '{other}' and {size} in '{name}'"
        for symbol, terms in self._sums.items():
            if symbol in known and all(term in known for term in terms):
                size, name = known[symbol]
                if (total := sum(known[term][0] for term in terms)) != size:
                    return f"'{symbol}' is {total} by the other inputs and {size} in '{name}'"
        return ""

    def check(self, arrays: Mapping[str, Feed]) -> None:
        """Raise FeedError if the arrays contradict the names: ranks read these sizes off any input that has them."""
        if said := self.contradiction(arrays):
            raise FeedError(f"{said}: this package treats them as one size, since the model gives them one name")


def explain_failure(error: BaseException, arrays: Mapping[str, Feed], inputs: Sequence[Tensor]) -> BaseException:
    """The error of a request; a SizesError if an engine failed on arrays that contradict the model's names of sizes."""
    if not isinstance(error, EngineError) or not (said := NamedSizes(inputs).contradiction(arrays)):
        return error
    explained = SizesError(f"{said}, and the model takes no such sizes together: {error}")
    explained.__cause__ = error
    return explained
