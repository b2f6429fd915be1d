"""Generate arrays for a package's inputs: by their roles, or as a user says (`--fill`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from splitc.runtime.arrays.array import Array, number_type
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Fill, Tensor
from splitc.runtime.units import named_values, shortened

# How ends of random numbers are written, and how large they may be.
_NUMBER, MOST = re.compile(r"-?[0-9]{1,30}"), 1 << 63
FILLS: Mapping[str, Fill] = {
    "normal": Fill("normal"),
    "ones": Fill("ones"),
    "zeros": Fill("zeros"),
    "arange": Fill("arange"),
}


def parse_fills(texts: Sequence[str]) -> dict[str, Fill]:
    """Fills from `NAME=ones`, `zeros`, `normal`, `arange` or `randint:LOW:HIGH`.

    Raises MisuseError for any other text.
    """
    form = f"NAME= and {', '.join(FILLS)}, or randint:LOW:HIGH"
    return {name: _read_fill(name, how, form) for name, how in named_values("--fill", texts, form).items()}


def _read_fill(name: str, how: str, form: str) -> Fill:
    if how in FILLS:
        return FILLS[how]
    where = f"--fill {name}={shortened(how)}"
    word, *ends = how.split(":")
    if word != "randint" or len(ends) != 2 or not all(map(_NUMBER.fullmatch, ends)):
        raise MisuseError(f"can't read {where}: write {form}")
    low, high = map(int, ends)
    if low >= high:
        raise MisuseError(f"{where}: LOW ({low}) must be less than HIGH ({high})")
    if not -MOST <= low < high <= MOST:
        raise MisuseError(f"{where}: numbers must be from -2^63 to 2^63")
    return Fill("randint", low, high)


def check_fills(fills: Iterable[str], names: Sequence[str]) -> None:
    """Raise MisuseError for a fill of an input that is not among these names."""
    if unknown := [name for name in fills if name not in names]:
        raise MisuseError(f"--fill names '{unknown[0]}', and there is no such input: there are {', '.join(names)}")


def make_inputs(
    inputs: Sequence[Tensor], seed: int = 0, fills: Mapping[str, Fill] = MappingProxyType({})
) -> dict[str, Array]:
    """Random arrays from a seed, in the shapes that the package was planned for. `fills` override the package's fills.

    Raises MisuseError for a fill of an unknown input.
    """
    check_fills(fills, [tensor.name for tensor in inputs])
    generator = np.random.default_rng(seed)
    return {
        tensor.name: fill_array(
            fills.get(tensor.name, tensor.fill or Fill("normal")), tensor.dtype, tensor.sample_shape or (), generator
        )
        for tensor in inputs
    }


def fill_array(fill: Fill, dtype: str, shape: Sequence[int], generator: np.random.Generator) -> Array:
    """An array of this type and shape, made by the fill."""
    shape = tuple(shape)
    if fill.kind == "randint":
        array: Array = np.asarray(generator.integers(fill.low, fill.high, shape))
    elif fill.kind == "arange":
        counted = np.arange(shape[-1] if shape else 1)
        counted = counted if shape else counted[0]  # a single position, such as a denoiser's timestep
        array = np.broadcast_to(counted % fill.high if fill.high else counted, shape)
    elif fill.kind == "normal":
        array = np.asarray(generator.standard_normal(shape))
    else:
        array = np.full(shape, fill.kind == "ones")
    return array.astype(number_type(dtype))
