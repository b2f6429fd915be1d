"""Weights on devices of their own: the nodes that go with them, the values that cross, and unchanged outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import json

from models.writer import save
from splitc.compiler import Plan, Request, compile_model, plan_model
from splitc.compiler.modes.layer import LayerSplit
from splitc.compiler.modes.replanning import plan_from_file
from splitc.compiler.planning.plan_file import PlanFile, to_file, write_plan
from splitc.compiler.request.places import ExpertsPlace, Place
from splitc.compiler.request.request import DISK
from splitc.runtime import Session
from splitc.runtime.errors import DoesNotFitError, MisuseError
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.steps import Receive, Run, Send
from tests.conftest import assert_close, run_whole
from tests.helpers.blocks import Block
from tests.helpers.mixtures import FORMS, ROWS, WIDE, Mixtures, Sizes, mixture_feeds
from tests.helpers.needs import need_experts
from tests.helpers.placed import assert_layer_has_its_cache

SHAPES = {"ids": (1, 5)}


def make_plan(model: Path, *places: str, devices: str = "2xcpu", **asked: object) -> Plan:
    own = tuple(Place(*text.split("=")) for text in places)
    return plan_model(model, devices, Request(**{"split_mode": "layer", "place": own, **asked}))  # type: ignore[arg-type]


def held(plan: Plan, rank: int) -> set[str]:
    return {weight.name or "" for weight in plan.analysis.costs.weights(plan.ranks[rank].stage.nodes)}


def crossing(plan: Plan) -> list[tuple[str, int, int]]:
    assert isinstance(plan.split, LayerSplit)
    return [(transfer.value.name or "", transfer.source, transfer.target) for transfer in plan.split.transfers]


@pytest.mark.parametrize("form", FORMS)
def test_experts_go_with_all_between_them(tmp_path: Path, mixtures: Mixtures, form: str) -> None:
    """In each layer only the tokens go there and come back."""
    model = mixtures(form)
    plan = make_plan(model, experts=ExpertsPlace("cpu1"), shapes=SHAPES)
    assert [(source, target) for _, source, target in crossing(plan)] == [(0, 1), (1, 0)] * 2
    assert all(plan.analysis.costs.shapes[name] == (5, WIDE) for name, _, _ in crossing(plan))
    assert all(cut.detour and cut.bytes == 4 * 5 * WIDE * 4 for cut in plan.cuts)
    assert all(".mixture" in name or "Constant" in name for name in held(plan, 1))
    need_experts(form)
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package", threads=1) as session:
        for feeds in (mixture_feeds(5), mixture_feeds(1), mixture_feeds(9, 3)):
            assert_close(session.run(feeds), run_whole(model, feeds))


def test_first_layers_only(mixtures: Mixtures) -> None:
    plan = make_plan(mixtures("fused", 3), experts=ExpertsPlace("cpu1", 2))
    assert {name for name in held(plan, 1) if "mixture." in name} >= {
        f"layers.{layer}.mixture.{part}" for layer in (0, 1) for part in ("first", "second")
    }
    assert "layers.2.mixture.first" in held(plan, 0)


def test_first_place_that_matches_counts(mixtures: Mixtures) -> None:
    """If all devices are named, weights placed on the first device stay in its blocks."""
    model = mixtures("fused")
    plan = make_plan(model, r"layers\.0.*mixture=cpu0", "mixture=cpu1", shapes=SHAPES)
    assert len(crossing(plan)) == 2
    assert "layers.0.mixture.first" in held(plan, 0) and "layers.1.mixture.first" in held(plan, 1)


def test_requests_read_places_as_the_command_line_does() -> None:
    request = Request(place=["a=cpu0", Place("b", "cpu1")], experts="cpu1:4")  # type: ignore[list-item,arg-type]
    assert (request.place, request.experts) == ((Place("a", "cpu0"), Place("b", "cpu1")), ExpertsPlace("cpu1", 4))
    with pytest.raises(MisuseError, match="can't read --experts cpu1:some"):
        Request(experts="cpu1:some")  # type: ignore[arg-type]


def test_names_are_those_of_weights_nodes_and_modules(mixtures: Mixtures) -> None:
    model = mixtures("fused")
    by_weight, by_node = (make_plan(model, place) for place in ("attention.q=cpu1", "^/layers.1/MatMul$=cpu1"))
    assert {name for name in held(by_weight, 1) if "attention" in name} == {f"layers.{n}.attention.q" for n in (0, 1)}
    assert {name for name in held(by_node, 1) if "attention" in name} == {"layers.1.attention.q"}


def test_table_is_a_stage_of_its_own(tmp_path: Path, mixtures: Mixtures) -> None:
    """Its rows go to the blocks, and nothing comes back: a stream's requests overlap as in a pipeline."""
    model = mixtures("fused")
    plan = make_plan(model, "^table$=cpu1")
    package = tmp_path / "package"
    compile_model(plan, package, verify=False)
    programs = [rank.program for rank in read_manifest(package).ranks]
    assert [[type(step) for step in program] for program in programs] == [[Receive, Run], [Run, Send]]
    with Session(package, threads=1, in_flight=3) as session:
        given = [mixture_feeds(length) for length in (3, 1, 6, 4)]
        for feeds, outputs in zip(given, session.map(given), strict=True):
            assert_close(outputs, run_whole(model, feeds))


def tied(folder: Path) -> Path:
    """A table that is also the head, transposed."""
    b = Block()
    table = b.w("table", ROWS, WIDE)
    x = b.op("Gather", table, b.indices("ids", [[1, 2, 3]], ["n", "t"]))
    for number in range(4):
        x = b.op("Add", x, b.op("Tanh", b.op("MatMul", x, b.w(f"w{number}", WIDE, WIDE))))
    b.give(b.op("MatMul", x, b.op("Transpose", table, perm=[1, 0])), shape=["n", "t", ROWS])
    save(b.model(), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("devices", ["2xcpu", "4xcpu"])
@pytest.mark.parametrize("has_operators", [True, False])
def test_both_ends_of_a_tied_model(
    tmp_path: Path, devices: str, has_operators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with several stages between them, and with engines that can't exchange values while they run."""
    if not has_operators:
        monkeypatch.setattr("splitc.runtime.engines.operator_library.is_built", lambda: False)
    model = tied(tmp_path)
    plan = make_plan(model, "table=cpu1", devices=devices, spread=True)
    placed = next(number for number, rank in enumerate(plan.ranks) if str(rank.device) == "cpu1")
    assert "table" in held(plan, placed)
    assert placed == len(plan.ranks) - 1 and len(plan.ranks) == int(devices[0])
    package = tmp_path / "package"
    compile_model(plan, package, verify=False)
    groups = {tuple(engine.group) for rank in read_manifest(package).ranks for engine in rank.engines}
    assert (groups == {()}) != has_operators
    with Session(package, threads=1, in_flight=3) as session:
        given = [mixture_feeds(length) for length in (3, 1, 700)]
        for feeds, outputs in zip(given, session.map(given), strict=True):
            assert_close(outputs, run_whole(model, feeds))


def test_layer_goes_with_its_cache(deep_decoder: Path, tmp_path: Path) -> None:
    """If all weights of a layer are placed, so are its states and attention."""
    plan = make_plan(deep_decoder, r"layers\.2\.=cpu1")
    assert_layer_has_its_cache(deep_decoder, plan, 1, tmp_path / "package")


def test_slot_goes_with_its_layer(tmp_path: Path) -> None:
    """Compiling compares a random adapter. With only the sum, the rank would not know of a request's adapter."""
    block = Block()
    wide = block.op("MatMul", block.data("x", (4, 32), ["n", 32]), block.w("up.weight", 32, 300))
    narrow = block.op("MatMul", block.op("Add", wide, block.w("up.bias", 300)), block.w("down", 300, 32))
    block.give(narrow, shape=["n", 32])
    save(block.model(), tmp_path / "model.onnx")
    compile_model(make_plan(tmp_path / "model.onnx", "up=cpu1", lora_slots=16), tmp_path / "package")
    ranks = read_manifest(tmp_path / "package").ranks
    assert [len(rank.overrides) for rank in ranks] == [2, 2]


def test_plan_is_read_back(tmp_path: Path, mixtures: Mixtures) -> None:
    model = mixtures("gathered")
    plan = make_plan(model, "table=cpu2", devices="3xcpu", experts=ExpertsPlace("cpu1"), shapes=SHAPES)
    write_plan(plan, tmp_path / "plan.json")
    again = plan_from_file(model, tmp_path / "plan.json")
    assert to_file(again) == to_file(plan)
    file = json.decode((tmp_path / "plan.json").read_bytes(), type=PlanFile)
    assert file.placed == {"table": "cpu2"} | {
        f"layers.{layer}.mixture.{part}": "cpu1" for layer in (0, 1) for part in ("first", "second")
    }
    assert crossing(again) == crossing(plan)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_edited_plan_moves_a_weight_back(tmp_path: Path, mixtures: Mixtures) -> None:
    model = mixtures("fused")
    path = tmp_path / "plan.json"
    write_plan(make_plan(model, "table=cpu1", experts=ExpertsPlace("cpu1")), path)
    with_all = path.read_text()
    for part in ("first", "second"):
        edit(path, f'"layers.0.mixture.{part}": "cpu1",', "")
    assert "layers.0.mixture.first" in held(plan_from_file(model, path), 0)
    path.write_text(with_all)
    edit(path, '"table": "cpu1",', "")
    with pytest.raises(MisuseError, match="leaves out the block prologue: add a line for it"):
        plan_from_file(model, path)
    path.write_text(with_all)
    edit(path, '"layers.0.mixture.first": "cpu1"', '"layers.0.mixture.first": "cpu0"')
    with pytest.raises(MisuseError, match='cpu0" under "placed": placed weights go to ranks without blocks'):
        plan_from_file(model, path)
    edit(path, '"layers.0.mixture.first": "cpu0"', '"nothing": "cpu1"')
    with pytest.raises(MisuseError, match='line "nothing: cpu1" under "placed", and the model has no such weight'):
        plan_from_file(model, path)


def test_edited_plan_of_row_mode_places_nothing(decoder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(plan_model(decoder, "2xcpu", Request(split_mode="row", row_min=32)), path)
    edit(path, '"placed": {}', '"placed": {"model.embed_tokens.weight": "cpu1"}')
    with pytest.raises(MisuseError, match='under "placed": in row mode the main device holds all that is not sliced'):
        plan_from_file(decoder, path)


def test_each_rank_needs_its_budget(mixtures: Mixtures) -> None:
    model = mixtures("stacked")
    with pytest.raises(DoesNotFitError, match=r"rank 1 \(cpu1\) needs .* and may use 50.0 KiB"):
        make_plan(model, experts=ExpertsPlace("cpu1"), memory=["cpu1=50KiB"])


def test_memory_counts_what_passes_once(mixtures: Mixtures) -> None:
    """Exchanged values are not held until the end: many layers need about as much as few."""
    few, many = (
        make_plan(mixtures("fused", layers), experts=ExpertsPlace("cpu1"), shapes={"ids": (1, 300)})
        for layers in (2, 6)
    )
    tokens = 300 * WIDE * 4
    for one, other in zip(few.ranks, many.ranks, strict=True):
        assert abs(one.memory.activations - other.memory.activations) < 2 * tokens
    assert few.ranks[1].memory.activations >= 2 * tokens


def test_weights_on_disk_count_for_no_budget(tmp_path: Path, mixtures: Mixtures) -> None:
    """Two CPU devices of 18 MiB hold 40 MiB of weights in mapped files, with the model's outputs."""
    model = mixtures("stacked", 2, Sizes(rows=20000, wide=128, inner=2500))
    asked = {"devices": "2xcpu", "spread": True, "shapes": {"ids": (1, 3)}, "memory": ["18MiB"]}
    for mode in ("layer", "tensor"):
        with pytest.raises(DoesNotFitError):
            make_plan(model, split_mode=mode, **asked)  # type: ignore[arg-type]
        plan = make_plan(model, split_mode=mode, weights_at=DISK, **asked)  # type: ignore[arg-type]
        assert sum(rank.memory.weights for rank in plan.ranks) > 39 << 20
        write_plan(plan, tmp_path / "plan.json")
        assert to_file(plan_from_file(model, tmp_path / "plan.json")) == to_file(plan)
        package = tmp_path / mode
        compile_model(plan, package, verify=False)
        assert read_manifest(package).maps_weights
        with Session(package, threads=1) as session:
            assert_close(session.run(mixture_feeds(3)), run_whole(model, mixture_feeds(3)), 2e-5)


def test_experts_are_placed_where_blocks_alone_do_not_fit(tmp_path: Path, mixtures: Mixtures) -> None:
    """On ever smaller devices: experts of some layers leave their blocks before nothing fits."""
    model = mixtures("dense", 2, Sizes(rows=3000, wide=256, inner=256, experts=8))
    asked = {"devices": "2xcpu", "spread": True, "shapes": {"ids": (1, 3)}}
    engines = max(rank.memory.engines for rank in make_plan(model, **asked).ranks)  # type: ignore[arg-type]
    for tenths in range(112, 100, -1):
        asked["memory"] = [f"{engines + tenths * (1 << 20) // 10}"]
        plan = make_plan(model, **asked)  # type: ignore[arg-type]
        if plan.analysis.partition.placed:
            break
    (placed,) = plan.analysis.partition.placed
    assert all(".mixture." in (weight.name or "") for weight in placed.weights)
    assert any("blocks alone do not fit: " in warning for warning in plan.warnings)
    assert not any(rank.missing for rank in plan.ranks)
    auto = make_plan(model, split_mode="auto", **asked)  # type: ignore[arg-type]
    assert any("layer on 2" in way.name and way.refused is None for way in auto.alternatives)
    compile_model(plan, tmp_path / "package", verify=False)
    with Session(tmp_path / "package", threads=1) as session:
        assert_close(session.run(mixture_feeds(3)), run_whole(model, mixture_feeds(3)), 2e-5)


WRONG = [
    (["nothing=cpu1"], {}, "no weight of more than 1 KiB has a name that 'nothing' matches.*\n.*table"),
    (["table=cpu7"], {}, "names the device 'cpu7', and the plan's devices are cpu0, cpu1"),
    ([], {"experts": ExpertsPlace("cpu1", 9)}, "only 2 layers of this model have experts"),
    ([r"mixture.first=cpu1", "mixture.second=cpu2"], {"devices": "3xcpu"}, "reads 'layers.0.mixture.first', which is"),
    ([r"\w=cpu1"], {}, "all of the model would go to cpu1"),
    (["table=cpu1"], {"split_mode": "row"}, "--place is for --split-mode auto, layer, tensor, batch: in row mode"),
    ([], {"weights_at": "moon"}, "unknown --weights-at 'moon': there are host, disk"),
    ([], {"weights_at": "disk", "devices": "cuda0", "memory": ["1GB"]}, "--weights-at disk is for CPU devices"),
    (["table=cpu1"], {"batch_groups": 2}, "--batch-groups is 2, one for each device, and weights that are placed want"),
]


@pytest.mark.parametrize(("places", "asked", "message"), WRONG)
def test_what_can_not_be_placed(mixtures: Mixtures, places: list[str], asked: dict[str, object], message: str) -> None:
    with pytest.raises(MisuseError, match=f"(?s){message}"):
        make_plan(mixtures("fused"), *places, **asked)  # type: ignore[arg-type]


def test_model_without_experts(decoder: Path) -> None:
    with pytest.raises(MisuseError, match="this model has no experts that splitc recognizes"):
        make_plan(decoder, experts=ExpertsPlace("cpu1"))


def test_placed_weights_make_auto_mode_layer_mode(mixtures: Mixtures) -> None:
    model = mixtures("fused")
    assert make_plan(model, "table=cpu1", split_mode="auto").split_mode == "layer"


def test_parts_agree_at_any_cut(tmp_path: Path, mixtures: Mixtures) -> None:
    """Single weights on three devices, in all combinations that a few patterns give."""
    model = mixtures("loop")
    for number, places in enumerate(
        [
            ["attention.k=cpu1", "attention.o=cpu2"],
            [r"mixture.1.first=cpu1", r"mixture.2.second=cpu2"],
            [r"\.up=cpu1", "head=cpu1", "table=cpu2"],
        ]
    ):
        plan = make_plan(model, *places, devices="4xcpu", shapes=SHAPES)
        compile_model(plan, tmp_path / f"package{number}", verify=False)
        with Session(tmp_path / f"package{number}", threads=1) as session:
            feeds = mixture_feeds(6, 2)
            assert_close(session.run(feeds), run_whole(model, feeds))
        assert all(rank.stage.nodes for rank in plan.ranks)
