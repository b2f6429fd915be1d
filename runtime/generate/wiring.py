"""The role of each module of a package in generating text, by its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from splitc.runtime.errors import MisuseError
from splitc.runtime.generate.signature import find_handed, find_logits
from splitc.runtime.package.manifest import Manifest, Tensor, of_role

T = TypeVar("T")
# The number of axes of an encoder's states: batch, positions, width.
STATES_AXES = 3


@dataclass(frozen=True)
class DecoderUses:
    """A decoder among modules. `first` reads the prompt and computes the caches that `step` continues with.

    One of the two may be missing: `first` alone reads all tokens again for each new one, `step` alone begins with empty
    caches.
    """

    first: str | None
    step: str | None

    @property
    def decoder(self) -> str:
        """The use that reads the newest token."""
        return self.step or self.first or ""

    def opened(self, make: Callable[[str], T]) -> tuple[T, T | None]:
        """The results of `make` for the use that reads the newest token, and for the prompt's if that is another."""
        return make(self.decoder), make(self.first) if self.first is not None and self.step is not None else None


@dataclass(frozen=True)
class Wiring(DecoderUses):
    """The modules that take part. `encoder` makes what the decoder reads besides tokens; None if that is nothing."""

    encoder: str | None


def find_uses(manifests: Mapping[str, Manifest], decoders: Sequence[str]) -> DecoderUses | None:
    """Which of these modules is which use of a decoder; None if they are none, or more than one of either."""
    steps = [name for name in decoders if manifests[name].states]
    firsts = [name for name in decoders if name not in steps]
    if not decoders or len(steps) > 1 or len(firsts) > 1:
        return None
    return DecoderUses(firsts[0] if firsts else None, steps[0] if steps else None)


def find_wiring(manifests: Mapping[str, Manifest]) -> Wiring:
    """Find an encoder and its decoder, or a decoder in two uses, among modules.

    Raises MisuseError if the modules are something else, or some are missing.
    """
    there = f"the modules {', '.join(manifests)}"
    decoders = [name for name, manifest in manifests.items() if is_decoder(manifest)]
    if (uses := find_uses(manifests, decoders)) is None:
        raise MisuseError(
            f"can't generate with {there}: splitc knows an encoder and its decoder, or a decoder in two uses (without "
            "caches, and with them). Name the one to generate with by --module; of several forms of them (fp16, int8), "
            "compile one: splitc compile FOLDER --module ENCODER --module DECODER"
        )
    wanting = {name: find_wanted(manifests[name]) for name in decoders}
    encoders = [
        name
        for name, manifest in manifests.items()
        if name not in decoders and any(find_links(manifests[decoder], manifest) for decoder in decoders)
    ]
    if len(encoders) > 1:
        raise MisuseError(f"can't generate with {there}: {' and '.join(encoders)} both compute what the decoder reads")
    encoder = encoders[0] if encoders else None
    makers = [manifests[name] for name in (encoder, uses.first) if name is not None]
    for name, wanted in wanting.items():
        known = {key for maker in makers for key in find_links(manifests[name], maker)}
        if missing := [needed for needed in wanted if needed not in known]:
            raise MisuseError(
                f"can't generate with {there}: none computes '{missing[0]}', which {name} reads. Compile the folder "
                "with the encoder and all uses of the decoder"
            )
    return Wiring(uses.first, uses.step, encoder)


def is_decoder(manifest: Manifest) -> bool:
    """Whether a model takes tokens and gives logits."""
    return bool(of_role(manifest.inputs, "indices") and find_logits(manifest))


def find_wanted(manifest: Manifest) -> list[str]:
    """The inputs that another model must compute: floating point ones that are no states."""
    states = {state.input for state in manifest.states}
    return [
        tensor.name
        for tensor in manifest.inputs
        if tensor.name not in states and "float" in tensor.dtype and tensor.role is None
    ]


def find_links(reader: Manifest, maker: Manifest) -> dict[str, str]:
    """The inputs of a model, each with the output of another model that feeds it: by name, or if only one fits."""
    wanted = set(find_wanted(reader))
    handed = find_handed(reader, {tensor.name for tensor in maker.outputs})
    links = {name: output for name, output in handed.items() if name in wanted}
    free = [tensor for tensor in maker.outputs if tensor.name not in links.values()]
    for tensor in reader.inputs:
        fitting = [output.name for output in free if fits(tensor, output)]
        if tensor.name in wanted and tensor.name not in links and len(fitting) == 1:
            links[tensor.name] = fitting[0]
    return links


def fits(taken: Tensor, made: Tensor) -> bool:
    """Whether both are states or embeddings of the same width; a symbol may be any width."""
    if taken.dtype != made.dtype or taken.shape is None or made.shape is None:
        return False
    if not len(taken.shape) == len(made.shape) == STATES_AXES:
        return False
    widths = {taken.shape[-1], made.shape[-1]}
    return len(widths) == 1 or any(not isinstance(width, int) for width in widths)


def find_masks(reader: Manifest, read: Collection[str], fixed: Collection[int]) -> list[Tensor]:
    """The masks of an encoder's positions: those as long as one of the inputs `read`, or of a length in `fixed`."""
    symbols = {
        size
        for tensor in reader.inputs
        if tensor.name in read and tensor.shape is not None
        for size in tensor.shape[1:]
        if isinstance(size, str)
    }
    masks = of_role(reader.inputs, "mask")
    return [mask for mask in masks if mask.shape and len(mask.shape) == 2 and mask.shape[1] in {*symbols, *fixed}]
