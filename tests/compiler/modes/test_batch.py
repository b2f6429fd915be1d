"""Groups of devices with the whole model each: how they divide rows, what they hold, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from models.writer import save
from splitc.compiler import Request, compile_model, plan_model
from splitc.compiler.errors import CannotSplitError
from splitc.compiler.modes.auto import predict
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.planning.clock import Prediction
from splitc.compiler.planning.host_groups import describe_hosts
from splitc.compiler.planning.plan import Plan
from splitc.compiler.planning.plan_file import write_plan
from splitc.compiler.sharding.axis_map import AxisMap
from splitc.runtime import Session
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.hardware.machine import Machine
from tests.compiler.sharding.test_random_blocks import RandomBlock
from tests.conftest import Arrays, assert_close, decoder_feeds, run_whole
from tests.helpers.command import splitc
from tests.helpers.packages import compile_mode

# Budgets here are those of tiny models.
pytestmark = pytest.mark.usefixtures("bare_engines")

BATCH = Request(split_mode="batch", memory=["1GiB"])
# A mask that is picked by row numbers, as exporters write masks: mask[arange(rows)[:, None], arange(length)].
PICKED = """<ir_version: 8, opset_import: ["": 17]>
picked (float[B,L] x, float[M,L] mask) => (float[B,L] y)
<int64 zero = {0}, int64 one = {1}, int64[1] last = {-1}, int64[1] first = {0}, int64[1] second = {1}>
{ sizes = Shape(x)
  rows = Gather(sizes, zero)
  length = Gather(sizes, one)
  row_numbers = Range(zero, rows, one)
  NUMBERS
  column_numbers = Range(zero, length, one)
  a = Unsqueeze(numbers, second)
  b = Unsqueeze(column_numbers, first)
  wide_a = Expand(a, sizes)
  wide_b = Expand(b, sizes)
  a_last = Unsqueeze(wide_a, last)
  b_last = Unsqueeze(wide_b, last)
  index = Concat <axis = -1> (a_last, b_last)
  own = GatherND(mask, index)
  y = Add(x, own) }"""
SAME = "numbers = Identity(row_numbers)"
# The same with what is written where the numbers say, as a model writes a part of a mask in place.
WRITTEN = PICKED.replace("GatherND(mask, index)", "ScatterND(mask, index, x)")


def request(feeds: Mapping[str, np.ndarray], split_mode: str = "batch", **more: Any) -> Request:
    return Request(split_mode, shapes={name: feed.shape for name, feed in feeds.items()}, **more)


@pytest.mark.parametrize("seed", range(4))
def test_random_blocks_are_right_with_any_rows(seed: int, tmp_path: Path) -> None:
    block, chance = RandomBlock(seed), np.random.default_rng(seed)
    model = tmp_path / "block.onnx"
    save(block.model(), model)
    shares = [1, 1], [3, 1], [2, 1, 1], [1, 5, 2]
    asked = request(block.feeds, tensor_split=shares[seed % len(shares)])
    compile_model(
        plan_model(model, [f"{len(asked.tensor_split or ())}xcpu"], asked), tmp_path / "package", verify=False
    )
    with Session(tmp_path / "package", threads=1) as session:
        for rows in (1, 2, 5, 7):
            feeds: Arrays = {"x": chance.standard_normal((rows, 3, block.hidden), np.float32)}
            assert_close(session.run(feeds), run_whole(model, feeds), 2e-5)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("y = Softmax <axis = 0> (x)", "not independent: the Softmax node that makes 'y'"),
        ("y = CumSum(x, axis)", "not independent: the CumSum node"),
        ("m = ReduceMean <axes = [0]> (x) y = Sub(x, m)", "not independent: the ReduceMean node that makes 'm'"),
        ("q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)", "it needs statistics of all of them"),
        (
            "end = Constant <value_ints = [3]> () y = Slice(x, axis, end)",
            "not independent: the Slice node that makes 'y'",
        ),
        (
            "end = Constant <value_ints = [900]> () y = Slice(x, axis, end)",
            "not independent: the Slice node that makes 'y'",
        ),
        (
            "n = RandomNormalLike(x) y = Add(x, n)",
            "the RandomNormalLike node that makes 'n' draws random numbers, and all",
        ),
    ],
)
def test_where_rows_meet_is_named(write_model: Callable[[str], Path], body: str, why: str) -> None:
    model = write_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[B,3] x) => (float[B,3] y) <int64[1] axis = {{0}}> {{ {body} }}"""
    )
    with pytest.raises(CannotSplitError, match=f"the rows of a batch can't be divided: .*{why}"):
        plan_model(model, ["2xcpu"], BATCH)
    text = splitc("plan", model, "-d", "2xcpu", "--split-mode", "batch", "--memory", "1GiB", code=1).stderr
    assert "the rows of a batch can't be divided" in text


@pytest.mark.parametrize("end", [10**9, 2**63 - 1])
def test_slice_to_the_end_keeps_the_rows(write_model: Callable[[str], Path], end: int) -> None:
    """Unlike a slice up to 3, a probe size, or up to 900, more than the planned rows."""
    model = write_model(
        f"""<ir_version: 8, opset_import: ["": 17]> g (float[B,3] x) => (float[B,3] y)
        <int64[1] axis = {{0}}, int64[1] end = {{{end}}}> {{ a = Slice(x, axis, end, axis) y = Neg(a) }}"""
    )
    plan = plan_model(model, ["2xcpu"], BATCH)
    assert plan.replicas is not None and plan.replicas.rows == {"x": 0, "y": 0}
    none = plan_model(model, ["2xcpu"], replace(BATCH, shapes={"x": (0, 3)}))
    assert none.prediction == Prediction(0, 0)  # a plan for a batch of no rows ended in a traceback


@pytest.mark.parametrize("asked", [BATCH, replace(BATCH, split_mode="tensor", batch_groups=2)])
def test_fallback_is_one_group_where_rows_meet(write_model: Callable[[str], Path], asked: Request) -> None:
    model = write_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[B,3] x) => (float[B,3] y) { a = Relu(x) b = Softmax <axis = 0> (a) c = Relu(b) y = Neg(c) }"""
    )
    plan = plan_model(model, ["4xcpu"], replace(asked, fallback="layer"))
    assert (plan.split_mode, plan.replicas) == ("layer", None)
    assert "split by layer instead: the rows of a batch can't be divided" in plan.warnings[0]


def test_model_whose_number_of_axes_is_a_size_has_no_rows(write_model: Callable[[str], Path]) -> None:
    model = write_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[B,4] x, int64[B] sizes) => (float[M,N] y) { a = Relu(x) y = Reshape(a, sizes) }"""
    )
    with pytest.raises(CannotSplitError, match="the rows of a batch can't be divided"):
        plan_model(model, ["2xcpu"], replace(BATCH, shapes={"x": (2, 4), "sizes": (2,)}))


def test_model_without_dynamic_sizes_is_refused(write_model: Callable[[str], Path]) -> None:
    model = write_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[1,3] x) => (float[1,3] y) { y = Relu(x) }"""
    )
    with pytest.raises(CannotSplitError, match="no input has an axis of dynamic size"):
        plan_model(model, ["2xcpu"], BATCH)


TO_SIZE = """<ir_version: 8, opset_import: ["": 17]> g (float[B,3] x, float[C,3] other) => (float y)
    <int64[2] zeros = {{0, 0}}> {{ z = Relu({0}) ends = Shape(z) a = Slice(x, zeros, ends) y = Add(a, z) }}"""


def test_slice_to_the_size_of_the_same_rows_keeps_them(write_model: Callable[[str], Path], tmp_path: Path) -> None:
    """As torch's older exporter cuts what is scattered to the size of its indices."""
    model = write_model(TO_SIZE.format("x").replace(", float[C,3] other", ""))
    compile_model(plan_model(model, ["2xcpu"], BATCH), tmp_path / "package")
    with Session(tmp_path / "package", threads=1) as session:
        assert session.manifest.batch == {"x": 0, "y": 0}
        for rows in (1, 2, 7):
            feeds: Arrays = {"x": np.random.default_rng(rows).standard_normal((rows, 3), np.float32)}
            assert_close(session.run(feeds), run_whole(model, feeds))


def test_slice_to_another_size_may_be_of_some_rows(write_model: Callable[[str], Path]) -> None:
    with pytest.raises(CannotSplitError, match="not independent: the Slice node that makes 'a'"):
        plan_model(write_model(TO_SIZE.format("other")), ["2xcpu"], BATCH)


@pytest.mark.parametrize("text", [PICKED, WRITTEN], ids=["picked", "written"])
@pytest.mark.parametrize("mask", ["B", "M"])
def test_rows_are_followed_through_masks_that_are_picked_or_written_by_row_numbers(
    write_model: Callable[[str], Path], tmp_path: Path, mask: str, text: str
) -> None:
    """Also if the exporter gives the mask's rows another name."""
    model = write_model(text.replace("NUMBERS", SAME).replace("[M,L]", f"[{mask},L]"))
    chance = np.random.default_rng(0)
    compile_model(plan_model(model, ["3xcpu"], BATCH), tmp_path / "package", verify=False)
    with Session(tmp_path / "package", threads=1) as session:
        assert session.manifest.batch == {"x": 0, "mask": 0, "y": 0}
        for rows in (1, 2, 7):
            feeds: Arrays = {name: chance.standard_normal((rows, 4), np.float32) for name in ("x", "mask")}
            assert_close(session.run(feeds), run_whole(model, feeds))


def test_other_modes_find_these_rows_for_micro_batches(write_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = write_model(PICKED.replace("NUMBERS", SAME))
    compile_model(plan_model(model, ["cpu0"], replace(BATCH, split_mode="layer")), tmp_path / "package", verify=False)
    chance = np.random.default_rng(0)
    feeds: Arrays = {name: chance.standard_normal((5, 4), np.float32) for name in ("x", "mask")}
    with Session(tmp_path / "package") as session:
        assert_close(session.run(feeds, micro_batch=2), run_whole(model, feeds))


@pytest.mark.parametrize("text", [PICKED, WRITTEN], ids=["picked", "written"])
@pytest.mark.parametrize(
    "numbers",
    [
        "last_row = Sub(rows, one) numbers = Sub(last_row, row_numbers)",
        "half = Add(one, one) numbers = Div(row_numbers, half)",
        "up = Add(row_numbers, one) numbers = Mod(up, rows)",
    ],
    ids=["the other way", "two rows share one", "the next row"],
)
def test_numbers_of_other_rows_are_no_rows(write_model: Callable[[str], Path], numbers: str, text: str) -> None:
    with pytest.raises(CannotSplitError, match="can't be divided: the rows along axis 0 of 'x' are not independent"):
        plan_model(write_model(text.replace("NUMBERS", numbers).replace("L]", "4]")), ["2xcpu"], BATCH)


@pytest.mark.parametrize("rows", ["B", "C"])
def test_inputs_of_the_same_rows_are_divided_together(
    rows: str, write_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Lengths are parts of an index whose other part counts the rows, by which a node writes to each of them."""
    model = write_model(
        """<ir_version: 8, opset_import: ["": 17]>
        lengths (float[B,4] x, int64[ROWS,4] mask) => (float[B,4] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] second = {1}>
        { size = Shape <end = 1> (x)  rows = Squeeze (size)  numbers = Range (zero, rows, one)
          count = ReduceSum <keepdims = 0> (mask, second)  place = Sub (count, one)
          a = Unsqueeze (numbers, second)  b = Unsqueeze (place, second)  index = Concat <axis = -1> (a, b)
          sum = ReduceSum <keepdims = 0> (x, second)  y = ScatterND (x, index, sum) }""".replace("ROWS", rows)
    )
    compile_model(plan_model(model, ["2xcpu"], BATCH), tmp_path / "package", verify=False)
    with Session(tmp_path / "package") as session:
        for count in (1, 2, 5):
            mask = (np.arange(4) <= np.arange(count)[:, None]).astype(np.int64)
            feeds: Arrays = {"x": np.random.default_rng(count).random((count, 4), np.float32), "mask": mask}
            np.testing.assert_array_equal(session.run(feeds)["y"], run_whole(model, feeds)["y"])


def test_inputs_of_the_same_rows_are_divided_together_or_not_at_all(write_model: Callable[[str], Path]) -> None:
    """No node relates the second axis of the table with the rows of x. A rank may take their number from there."""
    model = write_model(
        """<ir_version: 8, opset_import: ["": 17]>
        lengths (float[B,4] x, float[4,B] table) => (float[B,4] y)
        <int64[1] first = {0}>
        { sum = ReduceSum (table, first)  total = ReduceSum <keepdims = 0> (sum)  y = Add (x, total) }"""
    )
    with pytest.raises(CannotSplitError, match="the rows along axis 0 of 'x' are not independent"):
        plan_model(model, ["2xcpu"], BATCH)


def test_mask_is_as_long_as_an_empty_cache_and_new_tokens(write_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Each row picks its mask from that of all rows. Shorter masks would make it pick from the next row's."""
    model = write_model(
        """<ir_version: 8, opset_import: ["": 17]>
        cached (float[B,N] new, float[B,M] mask, float[B,P] past) => (float[B,T,3] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] last = {-1}, float[3] weight = {1, 2, 3}>
        { present = Concat <axis = 1> (past, new)
          rows = Shape <end = 1> (mask)  rows_number = Squeeze (rows)
          numbers = Range (zero, rows_number, one)  length = Shape <start = 1> (mask)  firsts = Mul (numbers, length)
          first = Unsqueeze (firsts, last)  total = Shape <start = 1> (present)  count = Squeeze (total)
          columns = Range (zero, count, one)  index = Add (first, columns)
          all = Reshape (mask, last)  own = Gather (all, index)
          masked = Mul (present, own)  single = Unsqueeze (masked, last)  y = Mul (single, weight) }"""
    )
    shapes = {"new": (1, 16), "mask": (1, 16), "past": (1, 0)}
    compile_model(plan_model(model, ["2xcpu"], replace(BATCH, shapes=shapes)), tmp_path / "package", verify=False)
    random = np.random.default_rng(0)
    feeds = {name: random.random((4, size), np.float32) for name, size in (("new", 3), ("mask", 8), ("past", 5))}
    with Session(tmp_path / "package") as session:
        np.testing.assert_array_equal(session.run(feeds)["y"], run_whole(model, feeds)["y"])


def test_output_without_rows_is_named(write_model: Callable[[str], Path]) -> None:
    """The mask written by row numbers is not named, since its rows are independent."""
    text = WRITTEN.replace("NUMBERS", SAME).replace(
        "mask) => (float[B,L] y)", "mask, float[4] other) => (float[B,L] y, float[4] z)"
    )
    model = write_model(text.replace("L]", "4]").replace("y = Add(x, own)", "y = Add(x, own) z = Neg (other)"))
    with pytest.raises(CannotSplitError, match="the output 'z' has no axis for the rows along axis 0 of 'x'"):
        plan_model(model, ["2xcpu"], BATCH)


def test_rows_may_not_be_written_on_a_diagonal(write_model: Callable[[str], Path]) -> None:
    """An index that selects a row on each of two axes divides neither."""
    model = write_model(
        """<ir_version: 8, opset_import: ["": 17]>
        diagonal (float[B] x, float[B,B] table) => (float[B,B] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] last = {-1}>
        { sizes = Shape(x)
          rows = Squeeze(sizes)
          numbers = Range(zero, rows, one)
          column = Unsqueeze(numbers, last)
          index = Concat <axis = -1> (column, column)
          y = ScatterND(table, index, x) }"""
    )
    with pytest.raises(CannotSplitError, match="can't be divided"):
        plan_model(model, ["2xcpu"], BATCH)


def test_row_numbers_that_meet_data_tell_rows_apart(write_model: Callable[[str], Path]) -> None:
    model = write_model(
        PICKED.replace("NUMBERS", SAME).replace(
            "y = Add(x, own)", "apart = Cast <to = 1> (a) shifted = Add(x, apart) y = Add(shifted, own)"
        )
    )
    with pytest.raises(CannotSplitError, match="can't be divided"):
        plan_model(model, ["2xcpu"], BATCH)


def test_nodes_whose_trial_fails_are_tried_with_the_models_sizes(
    write_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two lengths are concatenated and taken apart: with other bounds, a slice has another length."""

    def find_broken(_: object, axis_map: AxisMap, *__: object) -> dict[ir.Node, str]:
        slices = [node for node in axis_map.operations if node.op_type in ("Concat", "Softmax", "Slice")]
        return dict.fromkeys(slices, "the sizes were made up")

    monkeypatch.setattr("splitc.compiler.modes.rows.find_broken", find_broken)
    model = write_model(
        """<ir_version: 8, opset_import: ["": 17]>
        joined (float[B,T,4] text, float[B,L,4] picture) => (float[B,T,4] y, float[B,L,4] z)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] all = {9223372036854775807}>
        { both = Concat <axis = 1> (text, picture)
          sizes = Shape(text)
          length = Gather(sizes, one)
          sums = Softmax <axis = 1> (both)
          y = Slice(sums, zero, length, one)
          z = Slice(sums, length, all, one) }"""
    )
    shapes = {"text": (2, 3, 4), "picture": (2, 5, 4)}
    compile_model(plan_model(model, ["2xcpu"], replace(BATCH, shapes=shapes)), tmp_path / "package", verify=False)
    chance = np.random.default_rng(0)
    with Session(tmp_path / "package", threads=1) as session:
        for rows in (1, 3):
            feeds: Arrays = {name: chance.random((rows, *shape[1:]), np.float32) for name, shape in shapes.items()}
            assert_close(session.run(feeds), run_whole(model, feeds))


def test_weights_are_written_once_and_all_ranks_are_shown(decoder: Path, tmp_path: Path) -> None:
    feeds = decoder_feeds(batch=8)
    plan = plan_model(decoder, ["2xcpu"], request(feeds, tensor_split=[3, 1]))
    package = tmp_path / "package"
    compile_model(plan, package)
    assert [path.name for path in sorted(package.iterdir()) if path.is_dir()] == ["rank0"]
    shown = json.loads(splitc("inspect", package, "--json").stdout)
    assert (shown["split_mode"], shown["batch_groups"]) == ("batch", 2)
    assert [rank["device"] for rank in shown["ranks"]] == ["cpu0", "cpu1"]
    assert [rank["total_bytes"] for rank in shown["ranks"]] == [rank.memory.total for rank in plan.ranks]
    text = splitc("inspect", package).stdout
    assert "2 ranks in 2 groups, each with the whole model" in text


def test_commands_show_the_ranks_of_all_groups(decoder: Path, tmp_path: Path) -> None:
    package = compile_mode(decoder, "tensor in groups")
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    shown = ("--trace", trace, "--report", page, "--memory", "--in-flight", "2", "--runs", "8", "--warmup", "1")
    text = splitc("bench", package, *shown, "--threads", "1").stdout
    assert all(f"{number} cpu{number}" in text for number in range(4))
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3}
    assert "2 groups of ranks have all blocks each" in page.read_text()
    asked = ("-d", "4xcpu", "--split-mode", "tensor", "--batch-groups", "2")
    planned = splitc("plan", decoder, *asked, "--report", page).stdout
    assert "2 groups, each with the whole model; shares of the rows: 1, 1" in planned
    assert "tensor, in 2 groups" in page.read_text()


def test_memory_is_that_of_a_groups_rows(decoder: Path) -> None:
    feeds = decoder_feeds(batch=8)
    whole = plan_model(decoder, ["cpu0"], request(feeds, split_mode="layer")).ranks[0].memory
    six, two = (rank.memory for rank in plan_model(decoder, ["2xcpu"], request(feeds, tensor_split=[3, 1])).ranks)
    assert six.weights == two.weights == whole.weights
    assert (six.cache, two.cache) == (whole.cache * 6 // 8, whole.cache * 2 // 8)
    assert two.activations < six.activations < whole.activations


@pytest.mark.parametrize(("mode", "split"), [("batch", [3, 1]), ("layer", [1, 1, 1, 1]), ("tensor", [3, 1, 6, 2])])
def test_plan_is_made_again_from_its_file(decoder: Path, tmp_path: Path, mode: str, split: list[float]) -> None:
    groups = 1 if mode == "batch" else 2
    asked = request(decoder_feeds(batch=5), split_mode=mode, batch_groups=groups, tensor_split=split)
    plan = plan_model(decoder, [f"{len(split)}xcpu"], asked)
    write_plan(plan, tmp_path / "plan.json")
    again = plan_from_file(decoder, tmp_path / "plan.json")

    def held(plan: Plan) -> list[tuple[object, ...]]:
        return [(r.device, r.replica, r.group, r.part, r.memory, len(r.stage.blocks)) for r in plan.ranks]

    assert held(again) == held(plan)
    assert again.replicas is not None and plan.replicas is not None
    assert again.replicas.shares == pytest.approx(plan.replicas.shares)
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"batch_groups": 2', '"batch_groups": 3'))
    if mode != "batch":
        with pytest.raises(MisuseError, match="4 devices can't be divided into 3 equal groups"):
            plan_from_file(decoder, tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("devices", "asked", "why"),
    [
        ("3xcpu", {"split_mode": "layer", "batch_groups": 2}, "3 devices can't be divided into 2 equal groups"),
        ("cpu0", {"split_mode": "layer", "batch_groups": 2}, "1 device can't be divided into 2 equal groups"),
        ("2xcpu", {"batch_groups": 3}, "in batch mode the 2 devices are 2 groups"),
        (
            "4xcpu",
            {"split_mode": "tensor", "batch_groups": 2, "tensor_split": [3, 1, 1, 3]},
            "3,1 and 1,3: .* in the same proportion",
        ),
    ],
)
def test_impossible_groups_are_refused(decoder: Path, devices: str, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(MisuseError, match=why):
        plan_model(decoder, [devices], request(decoder_feeds(), **asked))


def test_copies_that_do_not_fit_are_refused_and_stages_are_not(deep_decoder: Path) -> None:
    """The second device has less memory than the whole model needs."""
    memory = ["cpu0=1GiB", "cpu1=632KiB"]
    with pytest.raises(DoesNotFitError, match=r"cpu1 holds prologue to layers\.\d: \d+ KiB of 632 KiB") as caught:
        plan_model(deep_decoder, ["2xcpu"], Request(split_mode="batch", memory=memory))
    assert "Each of the 2 groups holds the whole model" in str(caught.value)
    assert plan_model(deep_decoder, ["2xcpu"], Request(memory=["632KiB"])).replicas is None


@pytest.mark.parametrize("memory", [[], ["host0/cuda0=1GiB"], ["host1/cuda0=1GiB"]])
def test_devices_without_a_budget_are_told_once(decoder: Path, memory: list[str]) -> None:
    plan = plan_model(decoder, ["host0/cuda0", "host1/cuda0"], Request(split_mode="batch", memory=memory))
    unchecked = [warning for warning in plan.warnings if "memory was not checked" in warning]
    unknown = {"host0/cuda0", "host1/cuda0"} - {given.partition("=")[0] for given in memory}
    assert len(unchecked) == 1
    assert ", ".join(sorted(unknown)) + "," in unchecked[0]


def test_groups_are_inside_hosts(decoder: Path) -> None:
    devices = ["host0/cpu0", "host1/cpu0", "host0/cpu1", "host1/cpu1"]
    plan = plan_model(decoder, devices, Request(split_mode="tensor", batch_groups=2, memory=["1GiB"]))
    assert [str(rank.device) for rank in plan.ranks] == ["host0/cpu0", "host0/cpu1", "host1/cpu0", "host1/cpu1"]
    assert [rank.replica for rank in plan.ranks] == [0, 0, 1, 1]
    assert describe_hosts(plan.ranks) == "2 hosts, groups inside"


def test_each_replica_takes_its_own_room_in_the_cache(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By prediction: a cache that holds what one group reads, but not both, makes them wait."""
    long = {name: feed.shape for name, feed in decoder_feeds(batch=2, new=100, past=0).items()}

    def latency() -> float:
        return predict(plan, Machine(), 1).latency

    plan = plan_model(decoder, ["2xcpu"], Request(split_mode="batch", threads=1, memory=["1GiB"], shapes=long))
    held = plan.ranks[0].memory.total
    monkeypatch.setattr("splitc.compiler.planning.clock.cores", lambda: 2)
    monkeypatch.setattr("splitc.compiler.planning.clock.cache_bytes", lambda: 3 * held)
    both = latency()
    monkeypatch.setattr("splitc.compiler.planning.clock.cache_bytes", lambda: 1.5 * held)
    assert latency() > 1.02 * both


def test_auto_divides_a_batch_where_that_is_faster(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By prediction: with a thread each, a long prompt of two rows takes half the time on two devices."""
    monkeypatch.setattr("splitc.compiler.planning.clock.cores", lambda: 2)
    monkeypatch.setattr("splitc.compiler.planning.clock.cache_bytes", lambda: 0)
    long = {name: feed.shape for name, feed in decoder_feeds(batch=2, new=400, past=0).items()}
    asked = Request(objective="latency", threads=1, memory=["1GiB"], shapes=long)
    plan = plan_model(decoder, ["2xcpu"], asked)
    times = {candidate.name: candidate.latency for candidate in plan.alternatives}
    assert times["batch on 2"] < 0.85 * times["one device"]
    assert plan.split_mode in ("batch", "tensor")
    grouped = plan_model(decoder, ["4xcpu"], Request(memory=["1GiB"], batch_groups=2))
    assert {candidate.name for candidate in grouped.alternatives} == {
        "batch on 2",
        *(f"{mode} on 2 groups of 2" for mode in ("layer", "tensor", "row")),
    }
