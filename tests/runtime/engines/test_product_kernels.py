"""Kernels of products that are loaded while an engine is, on a fake GPU."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from splitc.runtime.engines import product_kernels
from splitc.runtime.engines.product_kernels import MOST, ProductKernels, row_counts
from splitc.runtime.gpu.device import GpuDevice
from splitc.runtime.hardware.devices import Device
from splitc.runtime.package.products import Product
from tests.helpers.needs import needs_dlpack

pytestmark = [pytest.mark.usefixtures("gpus"), needs_dlpack]
HALF = Product(8, 32, "float16")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of any size are enough."""
    monkeypatch.setattr(product_kernels, "LEAST_WEIGHTS", 1)


@pytest.fixture
def gpu() -> GpuDevice:
    return GpuDevice(Device("cuda", 0))


def weight(size: int) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.zeros(size, np.uint8))


def asked(gpu: GpuDevice) -> list[tuple[Any, ...]]:
    """The sizes of the products that cuBLAS computed: columns, rows, inner."""
    assert not gpu.cuda.cublas.handles
    return [arguments[3:6] for arguments in gpu.cuda.cublas.asked]


def wait_for(kernels: ProductKernels) -> None:
    """Wait until all products were computed."""
    for thread in kernels._threads:
        thread.join(20)
        assert not thread.is_alive()


def load(gpu: GpuDevice, *products: Product, limit: int | None = None, size: int = 1 << 20) -> None:
    """Load until there are no more products."""
    kernels = ProductKernels(gpu)
    kernels.load(products, [weight(16), weight(size)], limit)
    wait_for(kernels)
    kernels.close()


def test_numbers_of_rows_go_from_coarse_to_fine() -> None:
    counts = row_counts()
    assert counts[:9] == [128, 256, 384, 512, 640, 768, 896, 1024, 64]
    assert sorted(counts) == list(range(8, MOST + 1, 8))


def test_products_are_computed_for_all_numbers_of_rows(gpu: GpuDevice) -> None:
    load(gpu, HALF, Product(16, 8, "float32", transposed=True))
    assert asked(gpu) == [size for rows in row_counts() for size in ((32, rows, 8), (8, rows, 16))]
    plain, transposed = gpu.cuda.cublas.asked[:2]
    # The order of the factors, their types and the lengths of their stored rows.
    assert (plain[1:3], plain[8:10], plain[11:13], plain[-5:]) == ((0, 0), (2, 32), (2, 8), (plain[-5], 2, 32, 68, -1))
    assert (transposed[1:3], transposed[8:10], transposed[11:13]) == ((1, 0), (0, 16), (0, 16))


def test_products_read_and_write_only_memory_that_they_have(gpu: GpuDevice) -> None:
    """The largest weight is read as both factors; the results have a limit."""
    load(gpu, HALF, size=32 * 8 * 2)
    assert {rows for _, rows, _ in asked(gpu)} == {8, 16, 24, 32}
    gpu.cuda.cublas.asked.clear()
    load(gpu, HALF, limit=16 + (1 << 20) + 64 * 32 * 2)
    assert {rows for _, rows, _ in asked(gpu)} == {*range(8, 65, 8)}
    gpu.cuda.cublas.asked.clear()
    load(gpu, HALF, limit=1 << 20)
    assert not asked(gpu)


def test_nothing_is_computed_once_it_is_closed(gpu: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    blas = gpu.cuda.cublas

    def wait(*arguments: Any) -> None:
        blas.asked.append(arguments)
        begun.set()
        assert go_on.wait(10)

    monkeypatch.setattr(blas, "gemmEx", wait)
    kernels = ProductKernels(gpu)
    kernels.load([HALF], [weight(1 << 20)])
    assert begun.wait(10)
    threading.Timer(0.1, go_on.set).start()
    kernels.close()
    assert len(asked(gpu)) == 1


def test_requests_do_not_wait_for_products(gpu: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is computed during a request, and soon after one."""
    monkeypatch.setattr(product_kernels, "QUIET", 0.2)
    kernels = ProductKernels(gpu)
    kernels.pause()
    kernels.load([HALF], [weight(1 << 20)])
    ended = time.monotonic() + 0.1
    time.sleep(0.1)
    kernels.resume()
    while not gpu.cuda.cublas.asked:
        assert time.monotonic() < ended + 10
    assert time.monotonic() > ended + 0.2
    wait_for(kernels)
    assert len(asked(gpu)) == len(row_counts())


def test_products_of_several_engines_are_computed_once(gpu: GpuDevice) -> None:
    kernels = ProductKernels(gpu)
    for products in ([HALF], [HALF, Product(16, 8, "float16")]):
        kernels.load(products, [weight(1 << 20)])
    wait_for(kernels)
    expected = [*((32, rows, 8) for rows in row_counts()), *((8, rows, 16) for rows in row_counts())]
    assert sorted(asked(gpu)) == sorted(expected)


def test_small_weights_and_no_products_load_nothing(gpu: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    load(gpu)
    monkeypatch.setattr(product_kernels, "LEAST_WEIGHTS", 1 << 30)
    load(gpu, HALF)
    assert not asked(gpu)


def test_a_product_that_fails_is_a_note(gpu: GpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise gpu.cuda.runtime.CUDARuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(gpu.cuda.cublas, "gemmEx", fail)
    load(gpu, HALF)
    assert not asked(gpu)
    assert gpu.notes == ["cuda0 loads kernels for products when they are needed: CUBLAS_STATUS_NOT_SUPPORTED"]
