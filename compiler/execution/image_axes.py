"""Where the batch and the spatial axes of an image come from, as far as ONNX Runtime knows when it blocks images."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from splitc.compiler.graphs.matching import is_onnx

# The value that an axis is of, its number, and how often it was halved since.
Origin = tuple[ir.Value, int, int]


def new_origins(node: ir.Node) -> tuple[Origin, ...]:
    """The axes of a node's result, if they come from no other value."""
    return tuple((node.outputs[0], axis, 0) for axis in (0, 2, 3))


def origins_after(node: ir.Node, origins: Sequence[Origin], window: Sequence[int]) -> tuple[Origin, ...]:
    """The axes of a convolution's or pool's result: the image's, if padding keeps them or the stride halves them.

    See NchwcTransformerImpl::ConvPoolShapeInference.
    """
    asked, own = node.attributes, list(new_origins(node))
    own[0] = origins[0]
    padding = asked.get_string("auto_pad", "NOTSET")
    pads = (0,) * 4 if padding != "NOTSET" else tuple(asked.get_ints("pads", (0,) * 4))
    strides, steps = asked.get_ints("strides", (1, 1)), asked.get_ints("dilations", (1, 1))
    if padding not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER") or len(window) != 2 or len(pads) != 4:
        return tuple(own)
    for axis in (0, 1):
        keeps = pads[axis] + pads[axis + 2] + 1 == window[axis] or padding.startswith("SAME")
        if steps[axis] == 1 and strides[axis] in (1, 2) and keeps:
            value, number, halved = origins[axis + 1]
            own[axis + 1] = value, number, halved + strides[axis] - 1
    return tuple(own)


def is_enlarged_in_blocks(node: ir.Node) -> bool:
    """Whether a Resize enlarges an image by stored integers, for which there is a blocked kernel.

    See NchwcTransformerImpl::TransformResize.
    """
    if not is_onnx(node, "Resize", "Upsample"):
        return False
    asked, is_old = node.attributes, len(node.inputs) == 2
    mode, places = asked.get_string("mode", "nearest"), asked.get_string("coordinate_transformation_mode", "half_pixel")
    if mode == "nearest" and not is_old:
        if places != "asymmetric" or asked.get_string("nearest_mode", "round_prefer_floor") != "floor":
            return False
    elif mode not in ("nearest", "linear") or (
        not is_old and places not in ("half_pixel", "asymmetric", "align_corners")
    ):
        return False
    factors = _factors(node, 1 if is_old else 2)
    return len(factors) == 4 and list(factors[:2]) == [1, 1] and all(f >= 1 and f == round(f) for f in factors)


def _factors(resize: ir.Node, place: int) -> list[float]:
    """The scales of a Resize, if they are stored or follow from stored sizes."""
    stored = [value.const_value if value is not None else None for value in resize.inputs[place:]]
    if stored and stored[0] is not None and stored[0].size:
        return [float(factor) for factor in stored[0].numpy()]
    image = resize.inputs[0]
    if len(stored) < 2 or stored[1] is None or image is None or image.shape is None or not image.shape.is_static():
        return []
    return [float(size) / int(own) for size, own in zip(stored[1].numpy(), image.shape.numpy(), strict=True) if own]
