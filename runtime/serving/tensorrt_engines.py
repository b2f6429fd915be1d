"""Which TensorRT engines Triton's TensorRT backend can load."""

from __future__ import annotations

from splitc.runtime.engines.kinds import TENSORRT
from splitc.runtime.errors import MisuseError
from splitc.runtime.package.manifest import Manifest

# The first TensorRT whose engines have int64: older ones take int32 where the model has that.
WITH_INT64 = 10
# The first one that the backend runs several ranks with.
WITH_RANKS = 11


def check_loadable(manifest: Manifest, least: int, option: str) -> None:
    """Raise MisuseError unless the engines are TensorRT's, from version `least` on, are built and have their weights.

    `option` is what the user is to leave out if they are not.
    """
    if manifest.engine != TENSORRT or manifest.build is None:
        raise MisuseError(
            f"Triton's TensorRT backend runs engines of TensorRT, and this package has {manifest.engine}'s: compile "
            f"with --engine tensorrt, or leave out {option}"
        )
    built = manifest.build.built
    if built is None:
        raise MisuseError("the engines are not built yet: run 'splitc build' on a machine with the GPUs, then export")
    if int(built.version.split(".")[0]) < least:
        raise MisuseError(
            f"Triton's TensorRT backend needs engines of TensorRT {least} or later here, and these are of "
            f"{built.version}: compile with a later one, or leave out {option}"
        )
    if manifest.build.options.strip_weights:
        raise MisuseError(
            f"the engines have no weights (--strip-weights), and Triton can't add them: compile without it, or leave "
            f"out {option}"
        )
    for rank in manifest.ranks:
        for engine in rank.engines:
            if lists := [name for name, sizes in engine.sizes.items() if sizes.values is not None]:
                raise MisuseError(
                    f"'{lists[0]}' is a list of sizes, which Triton can't feed to an engine: leave out {option}"
                )
