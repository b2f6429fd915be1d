"""An engine's entry in a manifest, and how engines are built on the target machine."""

from __future__ import annotations

from msgspec import Struct

from splitc.runtime.package.fused import Fused
from splitc.runtime.package.products import Product


class BuildOptions(Struct, frozen=True):
    """How TensorRT builds engines; None is TensorRT's default. `workspace` is in bytes.

    `tactic_sources` are names of trt.TacticSource. With `strip_weights` an engine reads its weights from its source.
    """

    optimization_level: int | None = None
    workspace: int | None = None
    version_compatible: bool = False
    hardware_compatible: bool = False
    weight_streaming: bool = False
    strip_weights: bool = False
    tactic_sources: list[str] | None = None


class Built(Struct, frozen=True):
    """What built the engines: TensorRT's version, and the name and compute capability of the GPU, if one was used."""

    version: str
    gpu: str | None = None
    compute_capability: str | None = None


class Build(Struct, frozen=True):
    """How a package's engines are built, and what built them (None: not built yet)."""

    options: BuildOptions
    built: Built | None = None


class Sizes(Struct, frozen=True):
    """The smallest, the typical and the largest shape of an engine's input.

    If the input is a shape vector, `values` are its smallest, typical and largest value; None otherwise.
    """

    shapes: tuple[list[int], list[int], list[int]]
    values: tuple[list[int], list[int], list[int]] | None = None


class Weight(Struct, frozen=True, array_like=True):
    """A weight of an engine, in a file beside it, from the byte `offset` on. `dtype` is numpy's name.

    `key` is equal for weights of a pipeline's modules with the same content, which may be stored once; "" for others.
    """

    name: str
    dtype: str
    shape: list[int]
    file: str
    offset: int
    key: str = ""


class EngineFile(Struct, frozen=True):
    """An engine of a rank: its file, relative to the package, and the names of its inputs and outputs.

    - `adapted`, `unmasked`: its files with slots for adapters, and without the preamble's masks.
    - `source`, `sizes`: the ONNX file that it is built from, if the package has it, and the input sizes.
    - `group`: the ranks of collectives inside the engine, its own included.
    - `sizes_only`: the inputs of which it reads the sizes, but not the data.
    - `weights`: those in files beside it that several sessions may share; None if they can't be listed.
    - `attends`, `convolves`: whether it has attention operators, or convolutions.
    - `unaligned_bias`: whether attention on a GPU adds a bias whose rows may have any length.
    - `experts`: whether it has the operator MoE, on a GPU.
    - `data_sizes`, `control_flow`: whether data decide sizes inside it, as NonZero's, or what it runs.
    - `branches_by_sizes`: whether it has an If that sizes alone decide: with known sizes it can be captured on a GPU.
    - `not_captured`: a node on the CPU that keeps ONNX Runtime from capturing the engine on a GPU, if one is known.
    - `fused`: its fused operators, on a GPU.
    - `products`: its products with weights whose number of rows requests decide, on a GPU.
    """

    path: str
    inputs: list[str]
    outputs: list[str]
    sizes_only: list[str] = []
    source: str | None = None
    sizes: dict[str, Sizes] = {}
    group: list[int] = []
    weights: list[Weight] | None = None
    attends: bool = True
    convolves: bool = True
    unaligned_bias: bool = False
    experts: bool = False
    data_sizes: bool = False
    control_flow: bool = False
    branches_by_sizes: bool = False
    not_captured: str = ""
    adapted: str | None = None
    unmasked: str | None = None
    fused: list[Fused] = []
    products: list[Product] = []
