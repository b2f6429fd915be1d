"""The names of modules that exporters leave at nodes."""

from __future__ import annotations

import json

import onnx_ir as ir

# What torch's newer exporter writes at a node: the modules that it is in, from the model's on, as a list in text.
_SCOPES = "pkg.torch.onnx.name_scopes"


def modules_of(node: ir.Node) -> list[str]:
    """The names of the modules that a node is in, the outermost first."""
    try:
        scopes = json.loads(node.metadata_props.get(_SCOPES, "[]").replace("'", '"'))
    except ValueError:
        scopes = []
    return [scope for scope in scopes[:-1] if isinstance(scope, str) and scope]
