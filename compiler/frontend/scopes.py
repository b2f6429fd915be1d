"""The names of modules that exporters record at nodes."""

from __future__ import annotations

import json

import onnx_ir as ir

# The key of torch's newer exporter for a node's modules, outermost first, as the text of a list.
_SCOPES = "pkg.torch.onnx.name_scopes"


def modules_of(node: ir.Node) -> list[str]:
    """The names of the modules that a node belongs to, outermost first."""
    try:
        scopes = json.loads(node.metadata_props.get(_SCOPES, "[]").replace("'", '"'))
    except ValueError:
        scopes = []
    return [scope for scope in scopes[:-1] if isinstance(scope, str) and scope]
