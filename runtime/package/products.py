"""Products with weights, as a manifest lists them: a GPU loads their kernels before requests need them."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

# The number types of products, and the bytes of a number.
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
# The most rows or columns of a weight: those that cuBLAS counts by 32 bits.
LARGEST = (1 << 31) - 1


class Product(Struct, frozen=True, array_like=True):
    """A product of rows with a weight: [rows, inner] x [inner, columns], all of one number type, numpy's `dtype`.

    A weight that is `transposed` is stored as [columns, inner].
    """

    inner: int
    columns: int
    dtype: str
    transposed: bool = False

    @property
    def item_bytes(self) -> int:
        """The bytes of a number."""
        return ITEM_BYTES[self.dtype]


def find_wrong(product: Product) -> Iterator[str]:
    """What is wrong with a product: cuBLAS could not compute it."""
    if product.dtype not in ITEM_BYTES:
        yield f"it is of type '{product.dtype}'"
    if not (0 < product.inner <= LARGEST and 0 < product.columns <= LARGEST):
        yield f"its weight has {product.inner} rows and {product.columns} columns"
