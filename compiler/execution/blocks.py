"""Images in ONNX Runtime's blocked layout for CPUs (NCHWc), and the nodes that reorder images into and out of it.

Convolutions and pools read and write blocked images, and some other nodes can too. An image is reordered back for any
other reader (core/optimizer/nchwc_transformer.cc).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from splitc.compiler.execution.convolutions import ACTIVATIONS, resolve
from splitc.compiler.execution.exchange import DOMAIN as EXCHANGE
from splitc.compiler.execution.exchange import EngineGraph, NodeShapes
from splitc.compiler.execution.fused import Fused
from splitc.compiler.execution.image_axes import Origin, is_enlarged_in_blocks, new_origins, origins_after
from splitc.compiler.execution.liveness import Reads
from splitc.compiler.execution.order import depth_first
from splitc.compiler.execution.patterns import DOMAIN as STEP
from splitc.compiler.execution.patterns import GELUS
from splitc.compiler.graphs.matching import made_by
from splitc.compiler.graphs.walks import producer_of
from splitc.compiler.operators.scratch import CHANNELS, in_blocks, reads_image, takes_blocks

RANK = 4  # rows, channels, and two axes
# The domains of nodes that are in no file, and read images plain.
_ADDED = (EXCHANGE, STEP)
DOMAIN, INTO, OUT_OF = "com.microsoft.nchwc", "ReorderInput", "ReorderOutput"
SINGLE = 4  # bytes: kernels for CPUs have images in single precision
POOLS, GLOBAL_POOLS = ("AveragePool", "MaxPool"), ("GlobalAveragePool", "GlobalMaxPool")
# What a convolution that has taken in a sum may apply to it, and what goes on by itself.
FOLLOWING = ("Relu", "Sigmoid", "Tanh")
GOING_ON = (*FOLLOWING, *GELUS, "QuickGelu")
CHANNELS_LAST, CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


@dataclass(frozen=True)
class Blocks:
    """The nodes that run when images are in the blocked layout, reorder nodes included, in execution order.

    - `parts`: results of nodes that a convolution absorbs, with the convolution's result.
    - `sums`: the value that a convolution adds its result to, if both have the same shape.
    - `bytes`: the sizes of blocked images and of reordered copies.
    - `plain`: copies in the plain layout, by the image they copy.
    - `taken`: the blocked images that a node reads, by the values it reads in the file.
    """

    order: Sequence[ir.Node]
    reads: Reads
    parts: Mapping[ir.Value, ir.Value] = field(default_factory=dict)
    sums: Mapping[ir.Node, ir.Value] = field(default_factory=dict)
    bytes: Mapping[ir.Value, int] = field(default_factory=dict)
    plain: Mapping[ir.Value, ir.Value] = field(default_factory=dict)
    taken: Mapping[ir.Node, Mapping[ir.Value, ir.Value]] = field(default_factory=dict)

    def read(self, node: ir.Node, value: ir.Value) -> ir.Value:
        """The value that a node reads in place of a value of the file."""
        return self.taken.get(node, {}).get(value) or self.plain.get(value, value)


@dataclass(frozen=True)
class _Image:
    """A blocked image: the value that holds it, its channels, the origins of its axes, and the node that makes it."""

    value: ir.Value
    channels: int
    origins: tuple[Origin, ...]
    maker: ir.Node


def find_blocks(graph: EngineGraph, fused: Fused) -> Blocks:
    """The nodes that run, with images in blocks where any node can make them and shapes are given."""
    if graph.shapes is None or all(node.op_type not in ("Conv", *POOLS) for node in fused.nodes.order):
        return Blocks(fused.nodes.order, fused.nodes.reads)
    return _BlockWalk(graph, fused, graph.shapes).walk()


class _BlockWalk:
    """Walks nodes in graph order, and decides for each whether it reads and writes blocked images."""

    def __init__(self, graph: EngineGraph, fused: Fused, shapes: NodeShapes) -> None:
        self._graph, self._fused, self._shapes = graph, fused, shapes
        kept = fused.ends(graph.kept)
        order, reads, same = fused.nodes.order, fused.nodes.reads, fused.same
        self._uses = Counter(value for node in order for value in reads(node))
        self._uses.update(value for node in order for value in node.outputs if value in kept)
        self._made = {value for node in order for value in node.outputs}
        self._images: dict[ir.Value, _Image] = {}
        self._left: Counter[ir.Value] = Counter()  # readers that want an image plain
        self._into: dict[ir.Value, ir.Node] = {}  # the copies into blocks, by what they copy
        self._taken: dict[ir.Node, dict[ir.Value, ir.Value]] = {}  # what nodes read in blocks, by what they read
        self._bytes: dict[ir.Value, int] = {}
        self._parts: dict[ir.Value, ir.Value] = {}
        self._turned: set[ir.Node | None] = set()  # transposes that copies into blocks do
        self._added: dict[ir.Node, ir.Value] = {}
        self._sums: dict[ir.Node, ir.Value] = {}
        self._active = {resolve(same, value) for value in same if producer_of(value).op_type in ACTIVATIONS}
        self._new: list[ir.Node] = []  # in the order in which ONNX Runtime makes them

    def walk(self) -> Blocks:
        """The nodes that run."""
        for node in self._fused.nodes.order:
            self._visit(node)
        plain, copies = dict[ir.Value, ir.Value](), list[ir.Node]()
        for value, image in self._images.items():
            if self._left[value]:
                copy = ir.Node(DOMAIN, OUT_OF, (), num_outputs=1)
                copies.append(copy)
                plain[value] = copy.outputs[0]
                self._taken[copy] = {value: image.value}
                self._bytes[copy.outputs[0]] = self._graph.size(value)
                self._new.append(copy)
        gone = {value.producer() for value in self._parts} | self._turned
        nodes = [*(node for node in self._fused.nodes.order if node not in gone), *self._into.values(), *copies]
        position, reads = self._fused.position, self._read_after(plain)
        there = max(position.values(), default=0) + 1
        position = {**position, **{node: there + number for number, node in enumerate(self._new)}}
        order = depth_first(nodes, reads, position)
        return Blocks(order, reads, self._parts, self._sums, self._bytes, plain, self._taken)

    def _read_after(self, plain: Mapping[ir.Value, ir.Value]) -> Reads:
        def read(node: ir.Node) -> list[ir.Value]:
            taken = self._taken.get(node, {})
            if node.op_type == INTO and node.domain == DOMAIN:
                return [plain.get(value, value) for value in taken]
            if node.op_type == OUT_OF and node.domain == DOMAIN:
                return list(taken.values())
            own = [taken.get(value) or plain.get(value, value) for value in self._fused.nodes.reads(node)]
            return [*own, self._added[node]] if node in self._added else own

        return read

    def _visit(self, node: ir.Node) -> None:
        if node.op_type == "Conv":
            self._convolve(node)
        elif node.op_type in POOLS and not node.domain and len(node.outputs) == 1:
            self._pool(node)
        elif node.domain not in _ADDED and (images := self._inputs(node)):
            self._go_on(node, images)

    def _convolve(self, node: ir.Node) -> None:
        inputs, outputs = self._shapes(node)
        stored = [value for value in node.inputs[1:3] if value is not None]
        if not _is_single(node) or any(value in self._made for value in stored):
            return
        if not takes_blocks(node, inputs, outputs):
            return
        self._new.append(node)
        self._taken[node] = {}
        kernel = inputs[1]
        origins = new_origins(node) if reads_image(node, kernel) else self._enter(node, inputs[0], kernel[2:])
        self._make(node, outputs[0], origins)

    def _pool(self, node: ir.Node) -> None:
        """Handle a pool, which is blocked only if the file says how many channels it has."""
        image = node.inputs[0]
        shape = image.shape if image is not None else None
        channels = shape[1] if shape is not None and len(shape) == RANK else None
        inputs, outputs = self._shapes(node)
        is_known = len(inputs[0]) == len(outputs[0]) == RANK
        if is_known and _is_single(node) and isinstance(channels, int) and channels % CHANNELS == 0:
            self._new.append(node)
            self._taken[node] = {}
            origins = self._enter(node, inputs[0], node.attributes.get_ints("kernel_shape", ()))
            self._make(node, outputs[0], origins)

    def _enter(self, node: ir.Node, shape: Sequence[int], window: Sequence[int]) -> tuple[Origin, ...]:
        """Make a node read its image blocked. Returns the origins of its result's axes."""
        image = next(value for value in self._fused.nodes.reads(node))
        there = self._images.get(image)
        if there is not None:
            self._take(node, image)
            return origins_after(node, there.origins, window)
        if image not in self._into:
            copy = ir.Node(DOMAIN, INTO, (), num_outputs=1)
            self._into[image] = copy
            source = self._with_channels_last(image)
            self._taken[copy] = {source: source}
            self._bytes[copy.outputs[0]] = SINGLE * in_blocks(shape) if self._graph.size(node.outputs[0]) else 0
            self._new.append(copy)
        self._taken[node][image] = self._into[image].outputs[0]
        return new_origins(node)

    def _with_channels_last(self, image: ir.Value) -> ir.Value:
        """The image before a Transpose that the reorder node can do, if nothing else reads it; else the image."""
        maker = made_by(image, "Transpose") if image in self._made and self._uses[image] == 1 else None
        if maker is None:
            return image
        if tuple(maker.attributes.get_ints("perm", ())) != CHANNELS_FIRST:
            return image
        self._turned.add(maker)
        return next(iter(self._fused.nodes.reads(maker)))

    def _take(self, node: ir.Node, *read: ir.Value) -> None:
        for value in read:
            self._taken.setdefault(node, {})[value] = self._images[value].value
            self._left[value] -= 1

    def _make(self, node: ir.Node, shape: Sequence[int], origins: tuple[Origin, ...]) -> None:
        """Make a node write a blocked image."""
        value = node.outputs[0]
        self._images[value] = _Image(value, shape[1], origins, node)
        self._left[value] = self._uses[value]
        self._bytes[value] = SINGLE * in_blocks(shape) if self._graph.size(value) else 0

    def _inputs(self, node: ir.Node) -> list[ir.Value]:
        """The computed values that a node reads, if all of them are blocked images."""
        read = [value for value in self._fused.nodes.reads(node) if value in self._made]
        return read if all(value in self._images for value in read) else []

    def _go_on(self, node: ir.Node, read: list[ir.Value]) -> None:
        """Let a node whose inputs are all blocked read and write the blocked layout, if it has a kernel for it."""
        name, shape, origins = node.op_type, self._shapes(node)[1][0], self._images[read[0]].origins
        in_whole_blocks = all(self._images[value].channels % CHANNELS == 0 for value in read)
        is_all = len(read) == len(node.inputs)
        if len(shape) != RANK:
            return
        if name in GOING_ON or node in self._fused.silus:
            self._activate(node, read[0])
        elif name in ("Add", "Sum", "Mul") and is_all:
            self._combine(node, read)
        elif name == "Concat" and node.attributes.get_int("axis", 0) % RANK == 1 and is_all and in_whole_blocks:
            self._take(node, *read)
            self._make(node, shape, origins)
        elif name == "Transpose" and tuple(node.attributes.get_ints("perm", ())) == CHANNELS_LAST:
            self._take(node, *read)
        elif name == "BatchNormalization" and len(node.outputs) == 1:
            self._replace(node, read, shape, origins)
        elif is_enlarged_in_blocks(node) or (name in GLOBAL_POOLS and in_whole_blocks):
            self._replace(node, read, shape, new_origins(node))

    def _replace(
        self, node: ir.Node, read: Sequence[ir.Value], shape: Sequence[int], origins: tuple[Origin, ...]
    ) -> None:
        """Let a new node, which ONNX Runtime makes for this one, read and write the blocked layout."""
        self._new.append(node)
        self._take(node, *read)
        self._make(node, shape, origins)

    def _activate(self, node: ir.Node, read: ir.Value) -> None:
        image = self._images[read]
        may_join = node.op_type in FOLLOWING and image.maker.op_type == "Conv" and image.value not in self._active
        self._take(node, read)
        if may_join and self._uses[read] == 1:
            self._active.add(image.value)
            self._join(node, image)
        else:
            self._make(node, self._shapes(node)[1][0], image.origins)

    def _combine(self, node: ir.Node, read: list[ir.Value]) -> None:
        """Let a node add or multiply blocked images, or fuse an addition into the convolution before it."""
        images = [self._images[value] for value in read]
        if len({image.channels for image in images}) > 1:
            return
        fit = all(
            image.origins == images[0].origins or self._graph.alike(value, read[0])
            for value, image in zip(read, images, strict=True)
        )
        if not fit and node.op_type == "Mul":
            return
        self._take(node, *read)
        if fit and node.op_type != "Mul" and len(read) == 2:
            for value, other in (read, read[::-1]):
                image = self._images[value]
                if self._may_add(value, image):
                    self._added[image.maker] = self._images[other].value
                    if self._graph.alike(value, other):
                        self._sums[image.maker] = self._images[other].value
                    self._join(node, image)
                    return
        self._make(node, self._shapes(node)[1][0], images[0].origins if fit else new_origins(node))

    def _may_add(self, value: ir.Value, image: _Image) -> bool:
        is_convolution = image.maker.op_type == "Conv" and image.maker not in self._added
        return is_convolution and self._uses[value] == 1 and image.value not in self._active

    def _join(self, node: ir.Node, image: _Image) -> None:
        """Fuse a node into the convolution before it."""
        del self._taken[node]
        value = node.outputs[0]
        self._parts[value] = image.value
        self._images[value] = image
        self._left[value] = self._uses[value]


def _is_single(node: ir.Node) -> bool:
    return node.outputs[0].dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)
