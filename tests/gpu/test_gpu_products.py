"""Kernels of products can be loaded by CuPy's cuBLAS, for all types and layouts."""

from __future__ import annotations

import pytest

from splitc.runtime.engines import product_kernels
from splitc.runtime.engines.product_kernels import ProductKernels
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.gpu.weights import make_value
from splitc.runtime.hardware.devices import Device
from splitc.runtime.hardware.gpus import list_gpus
from splitc.runtime.package.manifest import Weight
from splitc.runtime.package.products import ITEM_BYTES, Product

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="needs a GPU")]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_products_are_computed(dtype: str, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else there is a note. Odd sizes too."""
    monkeypatch.setattr(product_kernels, "LEAST_WEIGHTS", 1)
    gpu = GpuDevice(Device("cuda", 0, 0))
    gpu.attach()
    memory = gpu.cuda.MemoryPointer(gpu.allocate(1 << 24), 0)
    weight = make_value(gpu, Weight("w", dtype, [1024, 1024], "", 0), memory)
    kernels = ProductKernels(gpu)
    products = [Product(inner, columns, dtype, transposed) for inner, columns in ((512, 1024), (77, 33))]
    kernels.load(products, [weight])
    for thread in kernels._threads:
        thread.join()
    gpu.wait_all()
    assert gpu.notes == []
