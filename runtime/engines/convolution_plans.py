"""How cuDNN's plans of convolutions are searched for, as options of ONNX Runtime's CUDA provider.

To try all plans, ONNX Runtime's default, takes longer, and finds slower ones: on an H200 a U-Net of 2.6 billion
parameters took 157 ms with it, and takes 72 with those that heuristics name. But these name none for some convolutions
of halves, as of 512 channels with a dilation of 12, by no rule that we know: for 24 of 369 usual ones. Then a request
fails, and is run again with the next search. The second one has an axis as the last of two instead of the first: with
it, 18 had no plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_HEURISTIC = {"cudnn_conv_algo_search": "HEURISTIC"}
# In the order in which they are used.
SEARCHES: Sequence[Mapping[str, str]] = (
    _HEURISTIC,
    {**_HEURISTIC, "cudnn_conv1d_pad_to_nc1d": "1"},
    {"cudnn_conv_algo_search": "EXHAUSTIVE"},
)
# In the message of a convolution without a plan.
NO_PLAN = "HEURISTIC_QUERY_FAILED"
NO_WAY_BACK = (
    "cuDNN's heuristics have no plan for a convolution, and an engine that waits for other ranks can't run again with "
    "another search; compile with --split-mode layer or batch, or from a model in float32. "
)
