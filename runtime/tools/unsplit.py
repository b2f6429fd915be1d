"""Run the unsplit model in ONNX Runtime, as the reference for a package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from splitc.runtime.arrays.array import number_type
from splitc.runtime.arrays.ort_values import run_on_arrays
from splitc.runtime.arrays.settings import setting_array
from splitc.runtime.engines import Backend, Engine
from splitc.runtime.engines.kinds import ONNXRUNTIME, make_backend
from splitc.runtime.engines.onnx_session import has_data_outside, load_unoptimized, open_content, output_names
from splitc.runtime.engines.onnxruntime_cpu import ERRORS
from splitc.runtime.errors import MisuseError, PackageError
from splitc.runtime.hardware.devices import Device, free_bytes, parse_devices
from splitc.runtime.package.manifest import FixedInput, Manifest, Tensor
from splitc.runtime.package.unfolded import unfolded
from splitc.runtime.requests.added_feeds import chosen_rows
from splitc.runtime.threads.futures import Executor
from splitc.runtime.tools.rounding import PRODUCTS, Arrays, nudged, nudged_weights, with_results
from splitc.runtime.units import format_bytes

RunModel = Callable[[Arrays], dict[str, npt.NDArray[Any]]]
CPU = Device("cpu", 0)
ONLY_GPUS = (
    "Only GPUs may have a kernel for it: compare it where one is, as with --reference cuda0. 'splitc compile' compared "
    "the package with the model in a form that CPUs run, unless it said otherwise."
)


@dataclass(frozen=True)
class Reference:
    """The unsplit model on a device. `why` says why it is not on the package's kind of device; "" if it is.

    All functions take the feeds of the package.

    - `run_unoptimized`: runs the model on the CPU without ONNX Runtime's optimizations; returns nothing if that fails.
    - `run_nudged`: runs it with numbers that differ in the last digit.
    - `overflowing`: a product of the model with float16 numbers that are infinite; "" if there is none.
    - `undefined`: a value of the model with numbers that are NaN; "" if there is none.
    """

    device: Device
    why: str
    run: RunModel
    run_unoptimized: RunModel
    run_nudged: Callable[[Arrays], Iterable[Arrays]]
    overflowing: Callable[[Arrays], str] = lambda feeds: ""
    undefined: Callable[[Arrays], str] = lambda feeds: ""

    def __str__(self) -> str:
        return describe_reference(self.device, self.why)


def describe_reference(device: object, why: str) -> str:
    """Describe the unsplit model and its device, for messages."""
    return f"the unsplit model on {device}" + (f" ({why})" if why else "")


@contextmanager
def open_reference(
    model: Path,
    manifest: Manifest,
    devices: Sequence[Device],
    threads: int,
    *,
    asked: str | None = None,
    needed: int | None = None,
    settings: Arrays = MappingProxyType({}),
    trusts_data: bool = False,
) -> Iterator[Reference]:
    """Open the unsplit model of a package, on the device `asked`, or on one of the package's kind.

    By default it runs on a GPU if the package does, and if `needed` bytes (of all ranks together) are free there:
    kernels of other devices round differently, most of all for quantized weights. `settings` are other values for bound
    inputs. With `trusts_data`, the model's data may lie outside its folder. Raises MisuseError for an unknown device,
    PackageError if ONNX Runtime can't load the model.
    """
    needed = sum(rank.total_bytes for rank in unfolded(manifest).ranks) if needed is None else needed
    device, why = choose_reference(asked, devices, needed, lambda gpu: free_bytes([gpu])[0])
    with ExitStack() as stack:
        try:
            run = stack.enter_context(open_unsplit(model, device, threads, trusts_data))
        except PackageError as error:
            if device.kind == "cpu" and isinstance(error.__cause__, ort_errors.NotImplemented):
                raise PackageError(f"{error}\n{ONLY_GPUS}") from error
            if device.kind == "cpu" or asked is not None:
                raise
            device, why = CPU, f"{device} can't run it: {error}"
            run = stack.enter_context(open_unsplit(model, device, threads, trusts_data))

        def given(feeds: Arrays) -> Arrays:
            return {**all_feeds(manifest, feeds), **settings}

        def chosen(outputs: Arrays, feeds: Arrays) -> dict[str, npt.NDArray[Any]]:
            return chosen_rows(manifest.kept_rows, outputs, feeds)

        yield Reference(
            device,
            why,
            lambda feeds: chosen(run(given(feeds)), feeds),
            lambda feeds: chosen(_run_unoptimized(model, given(feeds), trusts_data), feeds),
            lambda feeds: (chosen(made, feeds) for made in _run_nudged(model, given(feeds), run, device)),
            lambda feeds: _first_with(_is_infinite, model, given(feeds), PRODUCTS),
            lambda feeds: _first_with(_is_undefined, model, given(feeds)),
        )


def _run_unoptimized(model: Path, feeds: Arrays, trusts_data: bool) -> dict[str, npt.NDArray[Any]]:
    try:
        return _run_in(load_unoptimized(model, trusts_data=trusts_data), feeds)
    except ERRORS:
        return {}


def _run_nudged(model: Path, feeds: Arrays, run: RunModel, device: Device) -> Iterator[Arrays]:
    """The model's outputs on nudged feeds, and on a CPU with nudged weights.

    Feeds may have no part in a choice that rounding decides, as caches have hardly any in that of a router. Nudged
    weights with which the model does not run give no outputs.
    """
    yield from map(run, nudged(feeds))
    with suppress(*ERRORS):
        for content in nudged_weights(model) if device.kind == "cpu" else ():
            yield _run_in(open_content(content, model.parent), feeds)


def _first_with(holds: Callable[[Any], bool], model: Path, feeds: Arrays, operators: Sequence[str] = ()) -> str:
    """The first result of these operators, or of all, for which a condition holds; "" if there is none."""
    shown = with_results(model, operators)
    if shown is not None:
        names, content = shown
        with suppress(*ERRORS):
            made = _run_in(open_content(content, model.parent), feeds)
            return next((name for name in names if holds(made[name])), "")
    return ""


def _is_infinite(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == np.float16 and bool(np.isinf(array).any())


def _is_undefined(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind == "f" and bool(np.isnan(array).any())


def _run_in(session: ort.InferenceSession, feeds: Arrays) -> dict[str, npt.NDArray[Any]]:
    names = output_names(session)
    known = {value.name for value in (*session.get_inputs(), *session.get_overridable_initializers())}
    given = {name: feed for name, feed in feeds.items() if name in known}
    return dict(zip(names, run_on_arrays(session, names, given), strict=True))


def choose_reference(
    asked: str | None, devices: Sequence[Device], needed: int, free: Callable[[Device], int | None]
) -> tuple[Device, str]:
    """The device for the unsplit model, and why it is not of the package's kind. `free` returns a GPU's free bytes.

    Raises MisuseError if `asked` is not the name of a single device.
    """
    if asked is not None:
        named = parse_devices([asked])
        if len(named) != 1:
            raise MisuseError(f"--reference {asked} names {len(named)} devices: the unsplit model runs on one")
        return named[0], ""
    gpu = next((device.local for device in devices if device.kind == "cuda"), None)
    available = free(gpu) if gpu is not None else None
    if gpu is None or (available is not None and needed <= available):
        return gpu or CPU, ""
    size = "an unknown amount of memory" if available is None else format_bytes(available)
    return CPU, f"it needs {format_bytes(needed)}, and {gpu} has {size} free"


@contextmanager
def open_unsplit(model: Path, device: Device, threads: int, trusts_data: bool = False) -> Iterator[RunModel]:
    """Load a model, and return a function that runs it on feeds by name.

    Raises PackageError if ONNX Runtime can't load it on the device.
    """
    # All in a separate thread, since the caller's thread has its own current GPU.
    with Executor(1) as pool:
        backend = pool.submit(make_backend, ONNXRUNTIME, device, threads, None, False, trusts_data).result()
        pool.submit(backend.attach).result()
        engines = [pool.submit(load_unsplit, backend, model, trusts_data).result()]

        def run(feeds: Arrays) -> dict[str, npt.NDArray[Any]]:
            names = [*engines[0].inputs, *engines[0].optional.intersection(feeds)]
            need_inputs(model, names, feeds)
            values = {name: backend.upload(feeds[name]) for name in names}
            return dict(backend.download(engines[0].run(values, {})))

        try:
            yield lambda feeds: pool.submit(run, feeds).result()
        finally:
            pool.submit(engines.clear).result()
            pool.submit(backend.detach).result()


def load_unsplit(backend: Backend, model: Path, trusts_data: bool) -> Engine:
    """Load the unsplit model on a backend. With `trusts_data`, its data may lie outside its folder.

    Raises PackageError, which names the option if data lie outside and are not trusted.
    """
    try:
        return backend.load(model)
    except PackageError as error:
        if trusts_data or not has_data_outside(model):
            raise
        raise PackageError(f"{error}\n--trust-external-data permits data outside the model's folder") from error


def all_feeds(manifest: Manifest, feeds: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The feeds of a package, and arrays for inputs that only the unsplit model has."""
    return {**fixed_feeds(manifest.inputs, manifest.fixed, feeds), **feeds}


def fixed_feeds(inputs: Sequence[Tensor], fixed: Sequence[FixedInput], feeds: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Arrays for the model's inputs that are not among the package's `inputs`."""
    sizes = {
        symbol: size
        for tensor in inputs
        if tensor.name in feeds
        for symbol, size in zip(tensor.shape or (), feeds[tensor.name].shape, strict=False)
        if isinstance(symbol, str)
    }
    values = {}
    for tensor in fixed:
        shape = [size if isinstance(size, int) else sizes.get(size or "", 1) for size in tensor.shape or ()]
        value = np.zeros(shape) if tensor.value is None else np.asarray(tensor.value)
        values[tensor.name] = value.astype(number_type(tensor.dtype)).reshape(shape)
    return values


def bound_inputs(manifest: Manifest, settings: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Arrays with other values for bound inputs. Raises MisuseError for inputs that are not bound."""
    fixed = {tensor.name: tensor for tensor in manifest.fixed}
    if unknown := [name for name in settings if name not in fixed]:
        known = f"it bound {', '.join(fixed)}" if fixed else "it bound none"
        raise MisuseError(
            f"--set names '{unknown[0]}', which was not a constant when the package was compiled: {known}"
        )
    return {n: setting_array(n, value, fixed[n].dtype, fixed[n].shape) for n, value in settings.items()}


def need_inputs(model: Path, names: Iterable[str], feeds: Arrays) -> None:
    """Raise MisuseError if the model has inputs that a package's feeds lack: it is another model."""
    if missing := [name for name in names if name not in feeds]:
        raise MisuseError(
            f"{model} takes '{missing[0]}', and the package does not: it was made of another model. The package takes "
            f"{', '.join(feeds)}"
        )
