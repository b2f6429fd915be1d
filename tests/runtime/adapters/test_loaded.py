"""Adapters of requests: packages agree with packages that have the same adapters merged."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load_file

from splitc.compiler import Request, compile_model, plan_model
from splitc.runtime import MisuseError, Pipeline, Session
from splitc.runtime.adapters.asked import read_names
from splitc.runtime.adapters.held import HeldSum, KeptSums
from splitc.runtime.adapters.loaded import Adapters, LoadedAdapter
from splitc.runtime.package.manifest import Slot, Tensor
from splitc.runtime.package.manifest_file import read_manifest
from tests.conftest import assert_close, decoder_feeds
from tests.helpers.adapters import product, random_pairs, write_kohya, write_peft
from tests.helpers.command import SCRIPT, splitc
from tests.helpers.feeds import LAYERS
from tests.helpers.fuzz import damage_bytes, damage_json, seeds
from tests.helpers.mpi import MPIS
from tests.helpers.packages import write_modules

ATTENTION = {"self_attn.q_proj": (64, 64), "self_attn.o_proj": (64, 64)}
PARTS = {**ATTENTION, "mlp.up_proj": (64, 160), "mlp.down_proj": (160, 64)}
SIZES = {f"model.layers.{layer}.{part}": sizes for layer in range(LAYERS) for part, sizes in PARTS.items()}
SUMS: dict[str, dict[str, float]] = {"none": {}, "style": {"style": 1.0}, "both": {"style": 0.5, "pose": -0.25}}
WAYS: dict[str, tuple[str, Request]] = {
    "layer": ("2xcpu", Request(split_mode="layer", lora_slots=4)),
    "tensor": ("2xcpu", Request(split_mode="tensor", lora_slots=4)),
    "uneven": ("2xcpu", Request(split_mode="tensor", tensor_split=[5, 1], lora_slots=4)),
    "row": ("2xcpu", Request(split_mode="row", row_min=8, lora_slots=4)),  # A and B are as large
    "batch": ("2xcpu", Request(split_mode="batch", lora_slots=4)),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter for all layers, and one for some, of another rank."""
    folder = tmp_path_factory.mktemp("adapters")
    some = {name: sizes for name, sizes in SIZES.items() if "layers.1" in name}
    return {
        "style": write_peft(folder / "style", random_pairs(SIZES, 4, size=0.1)),
        "pose": write_kohya(folder / "pose.safetensors", random_pairs(some, 3, seed=1, size=0.2), alpha=6),
    }


@pytest.fixture(scope="module")
def slotted(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The decoder with slots, in one split mode."""
    folder = tmp_path_factory.mktemp("slotted")

    def make(way: str) -> Path:
        if not (folder / way).exists():
            compile_model(plan_model(decoder, *WAYS[way]), folder / way, verify=False)
        return folder / way

    return make


@pytest.fixture(scope="module")
def expected(decoder: Path, files: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The model's outputs with adapters merged into its weights, and without."""
    folder, given = tmp_path_factory.mktemp("merged"), {}
    for name, asked in SUMS.items():
        lora = [(str(files[adapter]), times) for adapter, times in asked.items()]
        compile_model(
            plan_model(decoder, ["cpu0"], Request(split_mode="layer", lora=lora)), folder / name, verify=False
        )
        with Session(folder / name) as session:
            given[name] = session.run(decoder_feeds(2, 5, 3))
    assert np.abs(given["style"]["logits"] - given["none"]["logits"]).max() > 0.05
    assert np.abs(given["both"]["logits"] - given["style"]["logits"]).max() > 0.05
    return given


def save_feeds(path: Path) -> None:
    feeds: dict[str, Any] = dict(decoder_feeds(2, 5, 3))
    np.savez(path, **feeds)


def test_program_may_change_its_folder(
    slotted: Callable[[str], Path], files: Mapping[str, Path], expected: Mapping[str, Any], monkeypatch: Any
) -> None:
    """Engines for adapters are loaded with the first request that has one."""
    package = slotted("layer")
    monkeypatch.chdir(package.parent)
    with Session(package.name, ranks="threads") as session:
        session.adapters.load("style", files["style"])
        monkeypatch.chdir("/")
        assert_close(session.run(decoder_feeds(2, 5, 3), adapters="style"), expected["style"])


@pytest.mark.parametrize(
    ("way", "ranks"), [*((way, "threads") for way in WAYS), ("tensor", "processes"), ("batch", "processes")]
)
def test_requests_have_their_adapters(
    slotted: Callable[[str], Path], files: Mapping[str, Path], expected: Mapping[str, Any], way: str, ranks: str
) -> None:
    feeds = decoder_feeds(2, 5, 3)
    with Session(slotted(way), ranks=ranks) as session:
        plain = session.run(feeds)
        assert_close(plain, expected["none"])
        assert session.adapters.load("style", files["style"]).unmatched == {}
        assert len(session.adapters.load("pose", files["pose"]).arrays) == 4
        both = {"style": 0.5, "pose": -0.25}
        futures = [session.submit(feeds, adapters=asked) for asked in ("style", both, {}, {"style": 0.0}, both, None)]
        for future, name in zip(futures, ("style", "both", "none", "none", "both", "none"), strict=True):
            assert_close(future.result(), expected[name])
            if name == "none":
                np.testing.assert_array_equal(future.result()["logits"], plain["logits"])
        assert_close(next(session.map([feeds], adapters="style")), expected["style"])
        if session.manifest.batch:
            assert_close(session.run(feeds, micro_batch=1, adapters=both), expected["both"])
        session.adapters.use("style")
        assert_close(session.run(feeds), expected["style"])
        np.testing.assert_array_equal(session.run(feeds, adapters={})["logits"], plain["logits"])
        session.adapters.unload("style")
        np.testing.assert_array_equal(session.run(feeds)["logits"], plain["logits"])


@pytest.mark.parametrize(("way", "ranks"), [("layer", "threads"), ("tensor", "processes"), ("batch", "threads")])
def test_a_sequence_keeps_its_adapters(
    slotted: Callable[[str], Path], files: Mapping[str, Path], expected: Mapping[str, Any], way: str, ranks: str
) -> None:
    """They go to the ranks with its first request. Other sequences have their own at the same time."""
    whole = decoder_feeds(2, 8, 0)
    with Session(slotted(way), ranks=ranks) as session:
        for name, file in files.items():
            session.adapters.load(name, file)
        sequences = {name: session.start(adapters=asked) for name, asked in SUMS.items()}
        for name in files:
            session.adapters.unload(name)
        alone = {}
        for start, stop in ((0, 5), (5, 6), (6, 8)):
            feeds = {n: whole[n][:, start:stop] for n in ("input_ids", "position_ids")}
            feeds["attention_mask"] = whole["attention_mask"][:, :stop]
            alone = {name: sequence.run(feeds) for name, sequence in sequences.items()}
        for name, asked in SUMS.items():
            for adapter in asked:
                session.adapters.load(adapter, files[adapter])
            given = session.run(whole, adapters=asked)
            np.testing.assert_allclose(alone[name]["logits"], given["logits"][:, 6:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kernel", [(), (1, 1), (3, 3)])
def test_sums_lie_side_by_side(kernel: tuple[int, ...], tmp_path: Path) -> None:
    """Adapters are concatenated along the ranks of A and B and padded with zeros: the product is the adapters' sum."""
    ones = [1 for _ in kernel]
    shapes: list[Any] = [["r", 5, *kernel], [7, "r", *ones]] if kernel else [[5, "r"], ["r", 7]]
    slots = []
    for number in range(2):
        a, b = (Tensor(f"{which}{number}", "float32", shape) for which, shape in zip("ab", shapes, strict=True))
        slots.append(Slot([f"layers.{number}.up"], 5, 7, a, b, 2.0, list(kernel)))
    adapters = Adapters(slots, KeptSums(itertools.count(), deque(), None))
    expected: Any = 0
    for seed, (rank, times) in enumerate(((3, 0.5), (7, -1.0))):
        pairs = random_pairs({"layers.0.up": (5, 7, *kernel)}, rank, seed)
        adapters.load(f"{seed}", write_peft(tmp_path / f"{seed}", pairs))
        expected = expected + times * product(pairs["layers.0.up"])  # the scale is 2, and the slot's factor is as well
    held = adapters.sum({"0": 0.5, "1": -1.0})
    assert held is not None
    made_a, made_b = held.arrays["a0"], held.arrays["b0"]
    if not kernel:
        made_a, made_b = made_a.T, made_b.T
    assert (made_a.shape, made_b.shape) == ((16, 5, *kernel), (7, 16, *ones))
    np.testing.assert_allclose(product((made_a, made_b)), expected, rtol=1e-5, atol=1e-5)
    assert not held.arrays["a1"].any() and not held.arrays["b1"].any()


def test_replaced_adapter_is_never_kept_as_the_new_one(tmp_path: Path) -> None:
    """A thread may replace it after a request has read it, and before the request's sum is kept."""

    class Late(KeptSums):
        def get(self, *asked: Any) -> HeldSum:
            if files:
                adapters.load("style", files.pop())
            return super().get(*asked)

    slots = [Slot(["up"], 5, 7, Tensor("a", "float32", [5, "r"]), Tensor("b", "float32", ["r", 7]), 1.0, [])]
    files = [write_peft(tmp_path / f"{seed}", random_pairs({"up": (5, 7)}, 4, seed)) for seed in range(2)]
    dropped = deque[int]()
    adapters = Adapters(slots, Late(itertools.count(), dropped, None))
    adapters.load("style", files.pop())
    old, new = adapters.sum("style"), adapters.sum("style")
    assert old is not None and new is not None and (old.arrays["b"] != new.arrays["b"]).any()
    assert adapters.sum("style") is new and not dropped
    del old
    assert list(dropped) == [0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers_that_are_not_finite_are_refused(dtype: str, tmp_path: Path) -> None:
    """In a file, or times a strength in the slots' type; and nothing warns before."""
    slots = [Slot(["up"], 5, 7, Tensor("a", dtype, [5, "r"]), Tensor("b", dtype, ["r", 7]), 1.0, [])]
    adapters, pairs = Adapters(slots, KeptSums(itertools.count(), deque(), None)), random_pairs({"up": (5, 7)})
    adapters.load("good", write_peft(tmp_path / "good", pairs), 0.5)
    pairs["up"][1][0, 0] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for file in (write_peft(tmp_path / "bad", pairs), {"up.lora_A.weight": np.full((1, 5), 1e300)}):
            if isinstance(file, dict):
                file["up.lora_B.weight"] = np.ones((7, 1))
            with pytest.raises(MisuseError, match=r"has numbers for '.*up' that are not finite in float32"):
                adapters.load("good", file)
        for strength in (1e300, -1e39, *([1e6] if dtype == "float16" else [])):
            with pytest.raises(MisuseError, match=f"the adapter 'good', times .*finite in {dtype}, for the layer up"):
                adapters.sum({"good": strength})
    held = adapters.sum("good")
    assert held is not None and np.isfinite(held.arrays["b"].astype(np.float32)).all()


def test_slots_cost_no_collective(decoder: Path, slotted: Callable[[str], Path]) -> None:
    """And requests without an adapter run as they would without slots."""
    for way in ("tensor", "uneven"):
        devices, request = WAYS[way]
        plan = plan_model(decoder, devices, Request(split_mode="tensor", tensor_split=request.tensor_split))
        manifest = read_manifest(slotted(way))
        assert manifest.collectives == plan.split.collectives
        assert len(manifest.slots) == 7 * LAYERS + 1 and not manifest.optional
        assert all(file.adapted for rank in manifest.ranks for file in rank.engines)


def test_wrong_adapters_are_refused_and_change_nothing(
    package: Path, slotted: Callable[[str], Path], files: Mapping[str, Path], tmp_path: Path
) -> None:
    with Session(package) as session, pytest.raises(MisuseError, match="has no slots for adapters"):
        session.adapters.load("style", files["style"])
    other = write_peft(tmp_path / "other", random_pairs({"h.0.c_attn": (64, 192)}))
    (tmp_path / "bad.safetensors").write_bytes(b"\x07" * 64)
    with Session(slotted("layer")) as session:
        session.adapters.load("style", files["style"])
        before = session.run(decoder_feeds(), adapters="style")
        for file, why in ((other, "another model"), (tmp_path / "bad.safetensors", "can't read the adapter")):
            with pytest.raises(MisuseError, match=why):
                session.adapters.load("style", file)
        refused: list[tuple[Any, str]] = [
            ("pose", "no adapter 'pose' is loaded: there are style"),
            ({"style": np.nan}, "not a finite number"),
            ({"style": "much"}, "could not convert string to float"),
            (["style"], "name one adapter, or give strengths by name"),
        ]
        for asked, why in refused:
            with pytest.raises(MisuseError, match=why):
                session.run(decoder_feeds(), adapters=asked)
            with pytest.raises(MisuseError, match=why):
                session.start(adapters=asked)
        with pytest.raises(MisuseError, match="the scale of an adapter"):
            session.adapters.load("other", files["style"], float("inf"))
        assert list(session.adapters) == ["style"] and session.adapters["style"].bytes > 0
        np.testing.assert_array_equal(session.run(decoder_feeds(), adapters="style")["logits"], before["logits"])


@pytest.mark.parametrize("kind", ["style", "pose"])
def test_arrays_take_the_place_of_a_file(slotted: Callable[[str], Path], files: Mapping[str, Path], kind: str) -> None:
    """By the names that they have in a file. Scales are among the arrays, or given."""
    file = files[kind] / "adapter_model.safetensors" if files[kind].is_dir() else files[kind]
    scale = 2.0 if kind == "style" else 1.0
    with Session(slotted("tensor")) as session:
        session.adapters.load("file", files[kind])
        arrays = session.adapters.load("arrays", load_file(file), scale)
        assert arrays.unmatched == {} and arrays.bytes == session.adapters["file"].bytes
        one, other = (session.run(decoder_feeds(2, 5, 3), adapters=name) for name in ("file", "arrays"))
        assert_close(other, one)
        with pytest.raises(MisuseError, match="the adapter that was given has nothing for this model"):
            session.adapters.load("arrays", {"x.lora_A.weight": np.ones((2, 3)), "x.lora_B.weight": np.ones((4, 2))})
        with pytest.raises(MisuseError, match="the adapter's 'x' can't be converted to an array"):
            session.adapters.load("arrays", {"x": [[1.0], [2.0, 3.0]]})
        assert_close(session.run(decoder_feeds(2, 5, 3), adapters="arrays"), one)


@pytest.mark.parametrize("seed", seeds(3, 8))
def test_random_damage_is_refused_or_harmless(
    slotted: Callable[[str], Path], files: Mapping[str, Path], seed: int, tmp_path: Path
) -> None:
    """In a header or elsewhere: there is an error message, and requests go on as before."""
    random, feeds = np.random.default_rng(seed), decoder_feeds(2, 5, 3)
    with Session(slotted("tensor")) as session:
        session.adapters.load("style", files["style"])
        expected = session.run(feeds, adapters="style")
        for number in range(24):
            source = files["style"] / "adapter_model.safetensors" if number % 3 else files["pose"]
            file = Path(shutil.copy(source, tmp_path / f"{number}.safetensors"))
            content = file.read_bytes()
            end = 8 + int.from_bytes(content[:8], "little")
            if number % 2:
                header = json.loads(content[8:end])
                damage_json(header, random)
                text = json.dumps(header).encode()
                file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
            else:
                file.write_bytes(damage_bytes(content[:end], random) + content[end:])
            with contextlib.suppress(MisuseError):
                session.adapters.load("bad", file)
                session.run(feeds, adapters="bad")
        np.testing.assert_array_equal(session.run(feeds, adapters="style")["logits"], expected["logits"])


def test_commands_take_adapters(
    slotted: Callable[[str], Path], files: Mapping[str, Path], expected: Mapping[str, Any], tmp_path: Path
) -> None:
    save_feeds(tmp_path / "in.npz")
    named = (f"{files['style']}:0.25", f"{files['pose']}:-0.25", f"{files['style']}:0.25")  # one is named twice
    assert read_names(",".join(named)) == {str(files["style"]): 0.5, str(files["pose"]): -0.25}
    adapters = [word for name in named for word in ("--adapter", name)]
    package = slotted("tensor")
    splitc("run", package, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz", *adapters)
    with np.load(tmp_path / "out.npz") as outputs:
        np.testing.assert_allclose(outputs["logits"], expected["both"]["logits"], rtol=1e-3, atol=1e-4)
    asked = ("generate", package, "--prompt-ids", "3,1,4,1,5", "-n", 8)
    assert splitc(*asked).stdout.split()[:8] != splitc(*asked, "--adapter", files["style"]).stdout.split()[:8]
    splitc("bench", package, "--runs", 2, "--no-memory", "--adapter", files["style"])
    assert f"{7 * LAYERS + 1} layers take adapters" in splitc("inspect", package).stdout


@pytest.mark.skipif(not MPIS, reason="there is no MPI")
def test_adapter_under_mpi(
    slotted: Callable[[str], Path], files: Mapping[str, Path], expected: Mapping[str, Any], tmp_path: Path
) -> None:
    save_feeds(tmp_path / "in.npz")
    where = ("--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz")
    process = MPIS[-1].start(2, SCRIPT, "run", slotted("tensor"), *where, "--adapter", files["style"])
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    with np.load(tmp_path / "out.npz") as outputs:
        np.testing.assert_allclose(outputs["logits"], expected["style"]["logits"], rtol=1e-3, atol=1e-4)


def test_modules_have_adapters_of_their_own(
    slotted: Callable[[str], Path], files: Mapping[str, Path], expected: Mapping[str, Any], tmp_path: Path
) -> None:
    """With some packages planned for swapping, so that modules work in turn."""
    package = write_modules(tmp_path / "modules", {"text_encoder": slotted("layer"), "unet": slotted("tensor")})
    feeds = decoder_feeds(2, 5, 3)
    asked = [(f"unet={files['style']}", 0.5), (f"unet={files['pose']}", -0.25)]
    for swap in (False, True):
        with Pipeline(package, swap=swap, adapters=asked) as modules:
            assert_close(modules["text_encoder"].run(feeds), expected["none"])
            assert_close(modules["unet"].run(feeds), expected["both"])
            modules["text_encoder"].adapters.load("style", files["style"])
            assert_close(modules["text_encoder"].run(feeds, adapters="style"), expected["style"])
            assert_close(modules["unet"].run(feeds, adapters={}), expected["none"])
    with pytest.raises(MisuseError, match="which module the adapter is for, as in text_encoder=FILE: text_"):
        Pipeline(package, adapters=[(str(files["style"]), 1.0)])


def test_what_has_no_slot_is_noted(slotted: Callable[[str], Path], tmp_path: Path) -> None:
    more = {**SIZES, "model.layers.0.self_attn.other": (64, 64)}
    style = write_peft(tmp_path / "style", random_pairs(more, 4, size=0.1))
    with Session(slotted("layer"), adapters=f"{style}:0.5") as session:
        assert session.adapters.used == {str(style): 0.5}
    with Session(slotted("layer"), adapters=[(str(style), 1.0)]) as session:
        (note,) = session.notes
        assert f"'{style}' is used in part: 1 of its {len(more)} layers have no slot here, such as" in note
        assert "model.layers.0.self_attn.other: no layer has its name" in note


def test_notes_are_told_while_another_thread_loads() -> None:
    adapters = Adapters([], KeptSums(itertools.count(), deque(), None))

    class Loads:
        """Its layers are counted as another adapter comes."""

        arrays: Mapping[int, Any] = MappingProxyType({})

        @property
        def unmatched(self) -> dict[str, str]:
            adapters._loaded["other"] = LoadedAdapter(1.0, {}, {})
            return {"up": "no layer has its name"}

    adapters._loaded["style"] = cast("LoadedAdapter", Loads())
    (note,) = adapters.notes
    assert note.startswith("the adapter 'style' is used in part: 1 of its 1 layers")
