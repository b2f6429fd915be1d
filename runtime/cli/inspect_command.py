"""The command inspect."""

from __future__ import annotations

from pathlib import Path

from splitc.runtime.cli.shared_options import JSON, PACKAGE
from splitc.runtime.cli.tables import print_manifest
from splitc.runtime.cli.terminal import print_json
from splitc.runtime.devices import list_devices
from splitc.runtime.manifest import Manifest
from splitc.runtime.manifest_file import read_manifest
from splitc.runtime.tools.routes import find_routes


def inspect(package: Path = PACKAGE, as_json: bool = JSON) -> None:
    """Show what a package holds: ranks, blocks, memory, what crosses the cuts."""
    manifest = read_manifest(package)
    routes = find_routes(manifest, list_devices)
    if as_json:
        print_json({**describe(manifest), "routes": routes})
    else:
        print_manifest(manifest, routes)


def describe(manifest: Manifest) -> dict[str, object]:
    """What `inspect --json` prints about the package itself."""
    return {
        "split_mode": manifest.split_mode,
        "engine": manifest.engine,
        "build": manifest.build,
        "source": manifest.source,
        "number_type": manifest.number_type,
        "blocks": len(manifest.blocks),
        "inputs": manifest.inputs,
        "outputs": manifest.outputs,
        "states": manifest.states,
        "ranks": [
            {
                "device": rank.device,
                "blocks": rank.blocks,
                "weights_bytes": rank.weights_bytes,
                "activation_bytes": rank.activation_bytes,
                "cache_bytes": rank.cache_bytes,
                "total_bytes": rank.total_bytes,
                "engines": rank.engines,
            }
            for rank in manifest.ranks
        ],
        "cut_bytes": [cut.bytes for cut in manifest.cuts],
        "cuts": manifest.cuts,
        "collectives": manifest.collectives,
        "unsplit": manifest.unsplit,
    }
