"""Tries the rules of the nodes that a choice of axes shards.

Results are kept in the user's cache: a form is tried once per version of splitc and ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec
import onnx_ir as ir
import onnxruntime as ort
from blake3 import blake3
from msgspec import Struct

from splitc.compiler.analysis.facts import Analysis
from splitc.compiler.nodes import operator_name
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.compiler.sharding.choice import Choice
from splitc.compiler.trials.forms import Form, find_forms
from splitc.compiler.trials.running import UNTRIED, try_forms
from splitc.runtime.errors import SplitcError
from splitc.runtime.files.cache import read_cache, write_cache
from splitc.runtime.version import VERSION

BROKEN = "its rule did not hold: "
# The cache's file of trials.
FILE = "trials.json"
# The most trials in a cache; with more, it is dropped as a whole. A choice: such a file takes 2 ms to read, and a model
# adds hundreds.
MOST = 20_000
# The rooms whose code decides the results.
ROOMS = ("operators", "sharding", "engine_graphs", "lowering", "trials")


def find_broken(analysis: Analysis, axis_map: AxisMap, choice: Choice) -> dict[ir.Node, str]:
    """The nodes that can't be sharded as chosen, since their operator's rule does not hold, each with the reason.

    One node of each form runs in ONNX Runtime at tiny sizes, whole and in uneven shards, as the lowering makes them.
    That a form can't be tried is not kept: it may be possible with other planned shapes.
    """
    forms = list(find_forms(analysis, axis_map, choice))
    distinct: Mapping[str, Form] = {form.digest: form for _, form in forms}
    known = known_trials()
    if new := [form for digest, form in distinct.items() if digest not in known]:
        results = try_forms(new, analysis.graph.graph.opset_imports, axis_map.bound)
        keep_trials({digest: why for digest, why in results.items() if not why.startswith(UNTRIED)})
        known = {**known, **results}
    reasons = {digest: why if why.startswith(UNTRIED) else f"{BROKEN}{why}" for digest, why in known.items() if why}
    return {node: reasons[form.digest] for node, form in forms if form.digest in reasons}


def broken_rules(broken: Mapping[ir.Node, str]) -> list[str]:
    """A warning for each operator whose rule did not hold; none for operators that could not be tried."""
    reasons: dict[str, list[str]] = {}
    for node, reason in broken.items():
        if reason.startswith(BROKEN):
            reasons.setdefault(operator_name(node), []).append(reason)
    return [
        f"{name} stays whole in {len(own)} nodes: tried in shards, {own[0]}. Results are right, but ranks hold more "
        "than they need to: please report it"
        for name, own in reasons.items()
    ]


class Trials(Struct, frozen=True):
    """The result for each form, by digest, with these versions: empty if its rule holds, else the error."""

    versions: str = ""
    results: dict[str, str] = {}


def known_trials() -> Mapping[str, str]:
    """The results of earlier trials with the same code."""
    with suppress(msgspec.DecodeError):
        trials = msgspec.json.decode(read_cache(FILE), type=Trials)
        if trials.versions == _versions():
            return trials.results
    return {}


def keep_trials(results: Mapping[str, str]) -> None:
    """Add results to those of earlier trials. If the cache can't be written, forms are tried again next time."""
    both = {**known_trials(), **results}
    if len(both) > MOST:
        both = dict(results)
    with suppress(SplitcError):
        write_cache(FILE, msgspec.json.encode(Trials(_versions(), both)))


@cache
def _versions() -> str:
    """The versions of splitc and ONNX Runtime, and a hash of the code in ROOMS."""
    folder = Path(__file__).resolve().parent.parent
    code = blake3()
    for path in sorted(path for room in ROOMS for path in (folder / room).glob("*.py")):
        code.update(path.read_bytes())
    return f"{VERSION} {ort.__version__} {code.hexdigest()[:16]}"
