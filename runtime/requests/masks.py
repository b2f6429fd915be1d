"""Attention masks in sequences with a capacity: padded to the caches' length, so that their sizes never change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitc.runtime.arrays.array import Array
from splitc.runtime.errors import FeedError
from splitc.runtime.package.manifest import Manifest, of_role
from splitc.runtime.requests.added_feeds import lengthened


@dataclass(frozen=True)
class CacheMasks:
    """The names of `masks` [batch, tokens so far], and of the inputs with one number for each new token."""

    masks: Sequence[str] = ()
    tokens: Sequence[str] = ()

    def count(self, feeds: Mapping[str, Array], before: int) -> int:
        """The tokens so far, after a request, with `before` of them before it. Raises FeedError for a mask of others.

        Kernels count the tokens by the mask, and take any number that a cache with a capacity has room for.
        """
        new = {feeds[name].shape[-1] for name in self.tokens if name in feeds}
        if not self.masks or len(new) != 1:
            return before
        total = before + int(new.pop())
        for name in self.masks:
            mask = feeds.get(name)
            if mask is not None and (mask.shape[1] < total or mask[:, total:].any()):
                raise FeedError(
                    f"'{name}' is for {mask.shape[1]} tokens, and the sequence comes to {total}: a mask is of all "
                    "tokens so far, those in the caches included"
                )
        return total

    def with_room(self, feeds: Mapping[str, Array], capacity: int | None) -> Mapping[str, Array]:
        """The feeds, with masks padded with zeros to the capacity.

        Kernels read several new tokens after earlier ones only in a batch of one row, and take a longer mask for such a
        request. So masks of several rows are padded only if each row has one new token.
        """
        if capacity is None or not self.masks:
            return feeds
        single = all(feeds[name].shape[-1] == 1 for name in self.tokens if name in feeds)
        fitting = [name for name in self.masks if name in feeds and (single or len(feeds[name]) == 1)]
        return {**feeds, **{name: lengthened(feeds[name], 1, capacity) for name in fitting}}


def find_cache_masks(manifest: Manifest) -> CacheMasks:
    """The masks of a model that writes all of its caches in place; none for other models.

    Where ranks get the number of filled rows, masks have that length. In a model with states of one size too, as of
    linear attention, a mask may also say which of the new tokens change these, unless tokens are only counted by it.
    """
    growing = [state for state in manifest.states if state.grows is not None]
    if not growing or manifest.lengths or not all(state.in_place for state in growing):
        return CacheMasks()
    has_others = not all(state.in_place for state in manifest.states)
    tokens, given = of_role(manifest.inputs, "indices"), of_role(manifest.inputs, "mask")
    # A mask with the shape of the ids is one of the new tokens, and one with a size of other inputs is an encoder's.
    of_new = [tensor.shape for tensor in tokens]
    known = {tensor.name for tensor in given} | {state.input for state in manifest.states}
    shapes = [tensor.shape or () for tensor in manifest.inputs if tensor.name not in known]
    of_others = {size for shape in shapes for size in shape if isinstance(size, str)}
    masks = [
        tensor.name
        for tensor in given
        if tensor.shape is not None
        and (not has_others or (tensor.role is not None and tensor.role.counted))
        and len(tensor.shape) == 2
        and not isinstance(tensor.shape[1], int)
        and tensor.shape not in of_new
        and tensor.shape[1] not in of_others
    ]
    return CacheMasks(masks, [tensor.name for tensor in tokens])
