"""The engines that are not replayed as CUDA graphs, as far as a package says."""

from __future__ import annotations

from splitc.runtime.gpu.weight_places import can_share
from splitc.runtime.package.manifest import EngineFile, Rank

# With a request of another shape, ONNX Runtime plans a convolution anew. cuDNN may then unload kernels that it compiled
# for the plan before, and a CUDA graph with them fails, which takes the process's GPU with it. So recordings are made
# in a session of their own.
UNLOADED = "has convolutions, whose kernels are unloaded when a request has another shape, and one session only"


def shares_weights(rank: Rank, file: EngineFile) -> bool:
    """Whether two sessions may share an engine's weights: only if it is the rank's only engine."""
    return len(rank.engines) == 1 and can_share(file.weights)


def why_unsafe_to_replay(rank: Rank, file: EngineFile) -> str:
    """Why a replay of an engine could be wrong, or end in a CUDA error; "" if no reason is known."""
    if file.data_sizes:  # a recording has the sizes of one request, and reads memory that is not its own with others
        return f"sizes in {file.path} depend on data"
    if file.control_flow:  # TensorRT captures the branch that one request took
        return f"{file.path} has control flow (If, Loop or Scan)"
    if file.branches_by_sizes and file.not_captured:  # ONNX Runtime, which refuses such nodes, is not asked about it
        return f"in {file.path}, {file.not_captured}"
    return f"{file.path} {UNLOADED}" if file.convolves and not shares_weights(rank, file) else ""


def why_not_replayed(rank: Rank, file: EngineFile) -> str:
    """Why a GPU that runs the engine does not replay requests, with a node if one is known; "" if it does."""
    if file.not_captured and not file.data_sizes:
        return f"in {file.path}, {file.not_captured}"
    return why_unsafe_to_replay(rank, file)
