"""Placement of modules: by size, by the user's choice, and within shared budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.writer import save
from splitc.compiler import Request, plan_pipeline
from splitc.compiler.pipelines.placement import Planner
from splitc.compiler.pipelines.plan import PipelinePlan
from splitc.compiler.request.places import ExpertsPlace, Place
from splitc.runtime.errors import DoesNotFitError, MisuseError
from tests.helpers.folders import diffusers_folder, text_encoder, write_decoders

# Budgets here are those of tiny models.
pytestmark = pytest.mark.usefixtures("bare_engines")


def devices(plan: PipelinePlan) -> dict[str, list[str]]:
    return {each.name: [str(rank.device) for rank in each.plan.ranks] for each in plan.modules}


def modes(plan: PipelinePlan) -> dict[str, str]:
    return {each.name: each.plan.split_mode for each in plan.modules}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 45, 577 and 1 KiB."""
    return diffusers_folder(tmp_path_factory.mktemp("diffusers"), unet_layers=16)


def test_large_modules_are_split_and_small_ones_stay_whole(folder: Path) -> None:
    plan = plan_pipeline(folder, ["3xcpu"], Request(memory=["1MiB"]))
    found = devices(plan)
    assert found["unet"] == ["cpu0", "cpu1", "cpu2"]
    assert len(found["text_encoder"]) == len(found["vae_decoder"]) == 1
    assert found["text_encoder"] != found["vae_decoder"], "the smaller one goes where more memory is free"
    assert [each.why for each in plan.modules] == [
        "whole, on the device with the most free memory",
        "split, to relieve the fullest device",
        "whole, on the device with the most free memory",
    ]


def test_modules_alike_are_not_split(tmp_path: Path) -> None:
    write_decoders(tmp_path)
    assert devices(plan_pipeline(tmp_path, ["2xcpu"])) == {
        "decoder_model": ["cpu0"],
        "decoder_with_past_model": ["cpu1"],
    }


def test_dominant_text_encoder_is_split(tmp_path: Path) -> None:
    found = devices(plan_pipeline(diffusers_folder(tmp_path, text_layers=20, unet_layers=1), ["2xcpu"]))
    assert {name: len(each) for name, each in found.items()} == {"text_encoder": 2, "unet": 1, "vae_decoder": 1}


def test_modules_go_where_they_are_asked_to(folder: Path) -> None:
    asked = ["te=cpu1,diffusion=cpu0&cpu2,vae_decoder=cpu0"]
    plan = plan_pipeline(folder, asked, Request(split_mode="unet=layer"))
    assert devices(plan) == {"text_encoder": ["cpu1"], "unet": ["cpu0", "cpu2"], "vae_decoder": ["cpu0"]}
    rest = plan_pipeline(folder, ["cpu0", "unet=cpu1&cpu2"], Request(split_mode="layer"))
    assert devices(rest) == {"text_encoder": ["cpu0"], "unet": ["cpu1", "cpu2"], "vae_decoder": ["cpu0"]}


def test_split_modes_of_modules(folder: Path) -> None:
    plan = plan_pipeline(folder, ["2xcpu"], Request(split_mode="layer,text_encoder=tensor"))
    assert modes(plan) == {"text_encoder": "tensor", "unet": "layer", "vae_decoder": "layer"}
    assert len(devices(plan)["text_encoder"]) == 2
    with pytest.raises(MisuseError, match="--row-min is for --split-mode row, which no module has"):
        plan_pipeline(folder, ["2xcpu"], Request(split_mode="layer", row_min=8))
    sliced = plan_pipeline(folder, ["2xcpu"], Request(split_mode="layer,text_encoder=row", row_min=8))
    assert modes(sliced)["text_encoder"] == "row"


@pytest.mark.parametrize(
    ("asked", "mode"),
    [(["2xcpu"], "unet=layer"), (["2xcpu"], "layer,unet=layer"), (["unet=cpu0&cpu1", "cpu0"], "auto")],
)
def test_weights_of_a_named_module_are_placed(folder: Path, asked: list[str], mode: str) -> None:
    request = Request(split_mode=mode, place=[Place("blocks.1", "cpu1")])
    found = {each.name: each.plan for each in plan_pipeline(folder, asked, request).modules}
    assert found["unet"].analysis.partition.placed and not found["text_encoder"].analysis.partition.placed
    alone = plan_pipeline(folder, ["2xcpu"], Request(place=[Place("blocks.1", "cpu1")]), wanted=["unet"])
    assert alone.modules[0].plan.analysis.partition.placed


@pytest.mark.parametrize("mode", ["auto", "layer"])
def test_places_need_a_module(folder: Path, mode: str) -> None:
    with pytest.raises(MisuseError, match=r"--experts is for single modules .* as in --split-mode unet=layer"):
        plan_pipeline(folder, ["2xcpu"], Request(split_mode=mode, experts=ExpertsPlace("cpu1")))


def test_groups_are_those_of_the_modules_that_are_split(folder: Path) -> None:
    plan = plan_pipeline(folder, ["2xcpu"], Request(batch_groups=2))
    assert modes(plan)["unet"] == "batch"
    assert {name: len(each) for name, each in devices(plan).items()} == {"text_encoder": 1, "unet": 2, "vae_decoder": 1}
    with pytest.raises(MisuseError, match="--batch-groups has no effect: no model of the folder is split"):
        plan_pipeline(folder, ["cpu0"], Request(batch_groups=2))


def test_shares_are_those_of_the_modules_that_are_split(folder: Path) -> None:
    plan = plan_pipeline(folder, ["2xcpu"], Request(split_mode="layer", tensor_split=[3, 1]))
    found = {each.name: [rank.memory.weights for rank in each.plan.ranks] for each in plan.modules}
    assert len(found["text_encoder"]) == len(found["vae_decoder"]) == 1
    first, second = found["unet"]
    assert 2 < first / second < 4


def test_budgets_are_shared(folder: Path) -> None:
    """The encoder's 45 KiB of weights stay loaded, and the largest activations of one module are added."""
    plan = plan_pipeline(folder, ["cpu0"], Request(memory=["1MiB"]))
    (total,) = plan.devices
    ranks = [each.plan.ranks[0] for each in plan.modules]
    assert total.weights == sum(rank.memory.weights for rank in ranks)
    running = [rank.memory.total - rank.memory.weights - rank.memory.cache for rank in ranks]
    assert total.total == total.resident + max(running)
    assert plan_pipeline(folder, ["cpu0"], Request(memory=[str(total.total)])).devices[0].missing == 0
    with pytest.raises(DoesNotFitError, match=r"module 'vae_decoder': (.|\n)*planned before it hold .* of cpu0"):
        plan_pipeline(folder, ["cpu0"], Request(memory=[str(total.total - 1)]))


def test_what_does_not_fit_one_device_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """140 KiB of weights, which is not more than an even share here."""
    monkeypatch.setattr(Planner, "count_splits", lambda *_: 0)
    for name in "ab":
        save(text_encoder(4).model(), tmp_path / name / "model.onnx")
    plan = plan_pipeline(tmp_path, ["cpu0", "cpu1"], Request(memory=["cpu0=282KiB", "cpu1=132KiB"]))
    assert devices(plan) == {"a": ["cpu0"], "b": ["cpu0", "cpu1"]}
    assert plan.modules[1].why == "split, since it does not fit the device with the most free memory"


def test_large_module_that_can_not_be_split_says_so(tmp_path: Path) -> None:
    """More devices than pieces, and weights that only layer mode splits."""
    write_decoders(tmp_path)
    module = plan_pipeline(tmp_path, ["9xcpu"]).modules[0]
    assert len(module.plan.ranks) < 9
    assert module.why == "large, but can't be split over all devices, so it is on fewer"
    assert any(warning.startswith("not split over all devices: ") for warning in module.plan.warnings)


def test_activations_of_earlier_modules_keep_their_room(tmp_path: Path) -> None:
    """The first module needs 200 KiB more while it runs, so that the second has less room than the weights leave."""
    save(text_encoder(5).model(), tmp_path / "a" / "model.onnx")
    save(text_encoder(4).model(), tmp_path / "b" / "model.onnx")
    shapes = {"a.input_ids": (1, 256), "b.input_ids": (1, 2)}
    plan = plan_pipeline(tmp_path, ["cpu0"], Request(memory=["10MiB"], shapes=shapes))
    (total,) = plan.devices
    assert total.activations > 2 * total.weights / 3
    request = Request(memory=[str(total.total - 64)], shapes=shapes)
    with pytest.raises(DoesNotFitError, match="module 'b'"):
        plan_pipeline(tmp_path, ["cpu0"], request)


def test_shapes_of_modules(folder: Path) -> None:
    shapes = {"unet.sample": (1, 4, 6, 6), "encoder_hidden_states": (1, 9, 32), "input_ids": (3, 4)}
    plans = {each.name: each.plan for each in plan_pipeline(folder, ["cpu0"], Request(shapes=shapes)).modules}
    assert plans["unet"].analysis.shapes == {"sample": (1, 4, 6, 6), "encoder_hidden_states": (1, 9, 32)}
    assert plans["text_encoder"].analysis.shapes == {"input_ids": (3, 4)}
    assert plans["vae_decoder"].analysis.shapes == {"latent_sample": (1, 4, 8, 8)}


def test_sizes_of_configs_are_for_their_symbols_only(folder: Path) -> None:
    """The user's sizes take precedence, and a config's size does not apply to other symbols."""
    request = Request(shapes={"unet.sample": (2, 4, 6, 6)})
    plans = {each.name: each.plan for each in plan_pipeline(folder, ["cpu0"], request).modules}
    assert plans["unet"].analysis.shapes == {"sample": (2, 4, 6, 6), "encoder_hidden_states": (2, 12, 32)}
    (folder / "tokenizer" / "tokenizer_config.json").rename(folder / "kept")
    (folder / "text_encoder" / "config.json").rename(folder / "kept_too")
    bare = {each.name: each.plan for each in plan_pipeline(folder, ["cpu0"]).modules}
    (folder / "kept").rename(folder / "tokenizer" / "tokenizer_config.json")
    (folder / "kept_too").rename(folder / "text_encoder" / "config.json")
    assert bare["unet"].analysis.shapes == {"sample": (1, 4, 8, 8), "encoder_hidden_states": (1, 16, 32)}


def test_uses_of_a_merged_decoder(tmp_path: Path) -> None:
    write_decoders(tmp_path)
    plan = plan_pipeline(tmp_path, ["cpu0"], wanted=["decoder_model_merged"])
    assert {each.name: list(each.plan.analysis.shapes) for each in plan.modules} == {
        "decoder_model": ["x"],
        "decoder_with_past_model": ["x", "past"],
    }
    bound = Request(settings={"decoder_model_merged.use_past": True})
    (module,) = plan_pipeline(tmp_path, ["cpu0"], bound, ["decoder_model_merged"]).modules
    assert (module.name, list(module.plan.analysis.shapes)) == ("decoder_model_merged", ["x", "past"])


@pytest.mark.parametrize(
    ("asked", "request_", "message"),
    [
        (
            ["vea=cpu0"],
            {},
            "-d names the module 'vea', which is not there: there are text_encoder, unet, vae_decoder; ",
        ),
        (["2xcpu"], {"split_mode": "controlnet=layer"}, "--split-mode names the module 'controlnet'"),
        (["2xcpu"], {"shapes": {"unet.ids": (1, 2)}}, "and unet has no such input: there are sample, encoder_hidden"),
        (["2xcpu"], {"settings": {"use_past": True}}, "no module has such an input: write MODULE.INPUT or INPUT"),
        (["cpu0"], {"tensor_split": [1]}, "--tensor-split has no effect: no model of the folder is split"),
        (["3xcpu"], {"tensor_split": [1, 2]}, "--tensor-split has 2 shares, and there are 3 devices"),
        (["unet=gpu7", "cpu0"], {}, "unknown device 'gpu7'"),
        (["te=cpu0", "te=cpu1"], {}, "-d names devices for text_encoder twice, the second time cpu1: write"),
        (["te=cpu0&cpu0", "cpu0"], {}, "-d te=cpu0&cpu0 names cpu0 twice for text_encoder"),
        (
            ["2xcpu"],
            {"split_mode": "unet=layer,unet=tensor"},
            "two modes for unet, layer and tensor",
        ),
        (["unet=cpu0", "cpu1"], {"memory": ["cpu7=1GiB"]}, "--memory names 'cpu7', and the devices are cpu0, cpu1"),
    ],
)
def test_contradictory_placements_are_refused(
    folder: Path, asked: list[str], request_: dict[str, object], message: str
) -> None:
    with pytest.raises(MisuseError) as error:
        plan_pipeline(folder, asked, Request(**request_))  # type: ignore[arg-type]
    assert message in str(error.value)
