"""diffusers' pipelines on packages: the images of the unsplit ONNX pipeline. Most tests need `make test-diffusers`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from splitc.compiler import Request, compile_pipeline, plan_pipeline
from splitc.runtime import FeedError, MisuseError, Pipeline
from splitc.runtime.integrations.diffusers import load
from tests.helpers.folders import diffusers_folder, write_json

Image = npt.NDArray[np.float32]
KINDS = ("sd", "sdxl", "sd3", "flux")
# Of numbers from 0 to 1. In 8 bits a step is 4e-3.
CLOSE = 1e-5
SPLITS = {
    "layer": (3, "layer"),
    "tensor": (2, "tensor"),
    "tensor-3": (3, "tensor"),
    # Nothing in an autoencoder is a matmul that is worth slicing.
    "row": (2, "row,vae=layer"),
    "batch": (2, "layer,diffusion=batch"),
    "auto": (2, "auto"),
}


def components(package: Path, **index: Any) -> Path:
    write_json(package / "model_index.json", {"_class_name": "StableDiffusionPipeline", **index})
    return package


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with the files of a pipeline, whose models are not diffusers'."""
    folder = tmp_path_factory.mktemp("drawn")
    compile_pipeline(plan_pipeline(diffusers_folder(folder / "models"), ["cpu0"]), folder / "package")
    return folder / "package"


def test_package_of_no_pipeline_is_refused(package: Path) -> None:
    with pytest.raises(MisuseError, match=r"has no model_index\.json: compile the folder of a pipeline"):
        load(package)


def test_module_that_is_no_component_is_named(drawn: Path) -> None:
    components(drawn, text_encoder=["transformers", "CLIPTextModel"], vae=["diffusers", "AutoencoderKL"])
    with pytest.raises(MisuseError, match=r"no component for the module 'unet'.*It has text_encoder, vae"):
        load(drawn)


def test_what_to_install_is_said(drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    components(drawn, **{name: ["diffusers", "Any"] for name in ("text_encoder", "unet", "vae")})
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MisuseError, match=r"pip install splitc\[diffusers\]"):
        load(drawn)


@pytest.fixture(scope="session")
def libraries() -> None:
    """The libraries that export and run the pipelines."""
    for name in ("torch", "diffusers", "optimum.onnxruntime"):
        pytest.importorskip(name)


@pytest.fixture(scope="session")
def exported(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small pipeline of a kind, as optimum writes it."""
    from optimum.exporters.onnx import main_export

    from models.diffusion import make

    made: dict[str, Path] = {}

    def export(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            make(kind).save_pretrained(folder / "torch")
            main_export(str(folder / "torch"), folder / "onnx", task="text-to-image", do_validation=False)
            made[kind] = folder / "onnx"
        return made[kind]

    return export


def compiled(folder: Path, package: Path, devices: int, mode: str) -> Path:
    """A package whose modules are all split over this number of CPU devices."""
    names = "&".join(f"cpu{device}" for device in range(devices))
    request = Request(split_mode=mode)
    request = replace(request, row_min=16) if "row" in mode else request
    plan = plan_pipeline(folder, [f"te={names},diffusion={names},vae={names}"], request)
    compile_pipeline(plan, package)
    return package


def draw(pipeline: Any, **options: Any) -> Image:
    import torch

    pipeline.set_progress_bar_config(disable=True)
    asked = {"num_inference_steps": 3, "guidance_scale": 3.0, "output_type": "np", **options}
    images: Image = pipeline("a cat on a mat", generator=torch.Generator().manual_seed(0), **asked).images
    return images


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_images_are_those_of_the_unsplit_pipeline(
    kind: str, split: str, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    """One image of the planned size, and two of another size."""
    from optimum.onnxruntime import ORTDiffusionPipeline

    folder = exported(kind)
    whole, made = ORTDiffusionPipeline.from_pretrained(folder), load(compiled(folder, tmp_path / "p", *SPLITS[split]))
    for options in ({"height": 64, "width": 64}, {"height": 96, "width": 48, "num_images_per_prompt": 2}):
        expected = draw(whole, **options)
        assert expected.std() > 0.1
        np.testing.assert_allclose(draw(made, **options), expected, rtol=0, atol=CLOSE)


def test_skip_connections_cross_the_cuts_of_a_unet(exported: Callable[[str], Path], tmp_path: Path) -> None:
    """The upsampling stage needs the downsampling path's values: as many bytes as the model's own tensors."""
    package = compiled(exported("sd"), tmp_path / "package", 2, "layer")
    with Pipeline(package) as pipeline:
        (cut,) = pipeline["unet"].manifest.cuts
    # Latents of 32 x 32, at 32 channels three times; at half the size 32 channels once and 64 twice.
    skips = [32 * 32 * 32] * 3 + [16 * 16 * 32] + [16 * 16 * 64] * 2
    # And what each block reads of the time step.
    assert 4 * sum(skips) <= cut.bytes <= 4 * sum(skips) + 1024


@pytest.fixture(scope="module")
def sd(exported: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(exported("sd"), tmp_path_factory.mktemp("sd") / "package", 2, "tensor")


def test_image_from_an_image(sd: Path, exported: Callable[[str], Path]) -> None:
    """diffusers makes another pipeline of the same components, which also encodes."""
    from diffusers import AutoPipelineForImage2Image
    from optimum.onnxruntime import ORTPipelineForImage2Image

    first = np.random.default_rng(0).random((1, 64, 64, 3), np.float32)
    whole = ORTPipelineForImage2Image.from_pretrained(exported("sd"))
    made = AutoPipelineForImage2Image.from_pipe(load(sd))
    options = {"image": first, "strength": 0.7}
    np.testing.assert_allclose(draw(made, **options), draw(whole, **options), rtol=0, atol=CLOSE)


def test_parts_stay_what_they_were_compiled_to(sd: Path) -> None:
    import torch

    pipeline = load(sd, threads=1)
    assert pipeline.unet.sessions["forward"].threads == 1
    assert pipeline.to("cpu") is pipeline
    with pytest.raises(MisuseError, match="can't move the pipeline to cuda"):
        pipeline.to("cuda")
    with pytest.warns(UserWarning, match=r"UNet2DConditionModel stays in torch\.float32"):
        pipeline.unet.to(torch.float16)
    with pytest.raises(MisuseError, match="unet is compiled, and can't be changed"):
        pipeline.enable_freeu(0.9, 0.2, 1.2, 1.4)
    with pytest.raises(FeedError, match=r"unet\.forward is called with 'down_block_additional_residuals'"):
        sample = torch.zeros(1, 4, 32, 32)
        pipeline.unet(sample, 1, torch.zeros(1, 77, 32), down_block_additional_residuals=(sample,))


def test_given_component_takes_the_place_of_the_packages(sd: Path) -> None:
    from diffusers import EulerDiscreteScheduler

    pipeline = load(sd, vae=None, scheduler=EulerDiscreteScheduler())
    assert pipeline.vae is None and isinstance(pipeline.scheduler, EulerDiscreteScheduler)


def test_component_that_is_not_in_the_package_is_named(exported: Callable[[str], Path], tmp_path: Path) -> None:
    compile_pipeline(plan_pipeline(exported("sd"), ["cpu0"], wanted=["unet", "vae_decoder"]), tmp_path / "package")
    with pytest.raises(MisuseError, match=r"no module for text_encoder.*text_encoder=None"):
        load(tmp_path / "package")
    pipeline = load(tmp_path / "package", text_encoder=None)
    with pytest.raises(MisuseError, match=r"the package has no module for vae\.encode"):
        pipeline.vae.encode(np.zeros((1, 3, 64, 64), np.float32))


def test_pipeline_that_optimum_does_not_know(libraries: None, tmp_path: Path) -> None:
    """A class-conditional transformer, exported by hand: its inputs have the names of forward's arguments."""
    import diffusers
    import torch

    from models.diffusion import Size, autoencoder

    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=4, sample_size=8
    ).eval()
    whole = diffusers.DiTPipeline(transformer, autoencoder(Size(image=16), latents=4), diffusers.DDIMScheduler())
    folder = tmp_path / "models"
    whole.save_pretrained(folder)
    latents, numbers = torch.zeros(2, 4, 8, 8), torch.zeros(2, dtype=torch.int64)
    inputs = {"hidden_states": latents, "timestep": numbers, "class_labels": numbers}
    export(transformer.forward, inputs, folder / "transformer")
    export(whole.vae.decode, {"z": latents}, folder / "vae_decoder")
    (folder / "vae_decoder" / "config.json").write_bytes((folder / "vae" / "config.json").read_bytes())
    compile_pipeline(plan_pipeline(folder, ["2xcpu"], Request(split_mode="tensor")), tmp_path / "package")

    def images(pipeline: Any) -> Image:
        pipeline.set_progress_bar_config(disable=True)
        options = {"generator": torch.Generator().manual_seed(0), "num_inference_steps": 3, "output_type": "np"}
        made: Image = pipeline(class_labels=[1, 5], **options).images
        return made

    np.testing.assert_allclose(images(load(tmp_path / "package")), images(whole), rtol=0, atol=1e-4)


OTHERS: dict[str, Any] = dict.fromkeys(("vae", "scheduler", "tokenizer", "text_encoder"))


@pytest.fixture
def wan(write_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Any]:
    """The transformer of a pipeline whose other parts are missing, which computes a graph in place of its layers."""
    torch, diffusers = (pytest.importorskip(name) for name in ("torch", "diffusers"))
    del torch

    def make(graph: str, request: Request = Request()) -> Any:
        transformer = tmp_path / "models" / "transformer"
        sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}
        diffusers.WanTransformer3DModel(**sizes).save_config(transformer)
        model = write_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}')
        # Names have no dots in the text of a model.
        (transformer / "model.onnx").write_bytes(model.read_bytes().replace(b"proj_weight", b"proj.weight"))
        names = {"transformer": "WanTransformer3DModel", "vae": "AutoencoderKLWan"}
        index = {"_class_name": "WanPipeline", **{name: ["diffusers", kind] for name, kind in names.items()}}
        write_json(tmp_path / "models" / "model_index.json", index)
        compile_pipeline(plan_pipeline(tmp_path / "models", ["cpu0"], request), tmp_path / "package")
        return load(tmp_path / "package", **OTHERS)

    return make


def test_model_that_a_pipeline_may_do_without(wan: Callable[..., Any]) -> None:
    """Its outputs keep their names, and the first is the sample; its weights can't be read until they are set."""
    import torch

    model = wan(
        "g (float[n, 4] hidden_states) => (float[n, 4] embedding) { embedding = Neg (hidden_states) }"
    ).transformer
    made = model(torch.ones(2, 4), None, None)
    assert made.embedding is made.sample is made[0] and made.sample[0, 0] == -1
    with pytest.raises(MisuseError, match=r"reads transformer\.scale_shift_table.* set it"):
        model.scale_shift_table  # noqa: B018  # reading it is the test
    model.scale_shift_table = torch.ones(2)
    assert model.scale_shift_table.sum() == 2


def test_fraction_that_is_cut_off_is_warned_of_once(wan: Callable[..., Any], recwarn: pytest.WarningsRecorder) -> None:
    """Schedulers have timesteps with fractions, and a model may be exported with whole ones."""
    import torch

    graph = """g (float[n, 4] hidden_states, int64 timestep) => (float[n, 4] sample) {
        time = Cast <to = 1> (timestep) sample = Add (hidden_states, time) }"""
    model, zeros = wan(graph).transformer, torch.zeros(1, 4)
    recwarn.clear()
    for time in (3, torch.tensor(3.0), torch.tensor(249.75), torch.tensor([0.5])[0]):
        assert model(zeros, time, None).sample[0, 0] == int(time)
    (said,) = (str(warning.message) for warning in recwarn if "is called with" in str(warning.message))
    assert "transformer.forward is called with 'timestep' 249.75, and the model was exported with whole" in said
    assert "Export it with 'timestep' of type float32" in said


def test_call_has_its_scale_of_adapters(wan: Callable[..., Any]) -> None:
    import torch

    zeros = ", ".join(["0"] * 64)
    graph = f"""g (float[n, 8] hidden_states) => (float[n, 8] sample)
        <float[8, 8] proj_weight = {{{zeros}}}> {{ sample = MatMul (hidden_states, proj_weight) }}"""
    pipeline = wan(graph, Request(split_mode="layer", lora_slots=4))
    ones = torch.ones(1, 8)
    pipeline.load_lora_weights({"proj.lora_A.weight": ones, "proj.lora_B.weight": ones.T}, "style")
    pipeline.set_adapters("style", 2.0)
    for kwargs, scale in ((None, 1.0), ({}, 1.0), ({"scale": 0.25}, 0.25), ({"scale": 0}, 0.0), (None, 1.0)):
        made = pipeline.transformer(ones, None, None, attention_kwargs=kwargs, return_dict=False)[0]
        assert made[0].tolist() == [16 * scale] * 8
    pipeline.unload_lora_weights()
    assert not pipeline.transformer(ones, None, None, attention_kwargs={"scale": 3.0}).sample.any()


def export(method: Any, inputs: dict[str, Any], folder: Path) -> None:
    """Write a method of a model as ONNX, with a batch of any size."""
    import torch

    class Module(torch.nn.Module):  # type: ignore[misc]  # the form that the exporter takes
        def __init__(self) -> None:
            super().__init__()
            self.model = method.__self__

        def forward(self, *args: Any) -> Any:
            return method(*args, return_dict=False)[0]

    folder.mkdir(exist_ok=True)
    axes = {name: {0: "batch"} for name in (*inputs, "sample")}
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": ["sample"], "dynamic_axes": axes}
    with torch.no_grad():
        torch.onnx.export(Module().eval(), tuple(inputs.values()), str(folder / "model.onnx"), dynamo=False, **names)


@pytest.fixture(scope="module")
def styles(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters as diffusers saves them: for two models, and for the denoiser alone."""
    pytest.importorskip("peft")
    from diffusers import StableDiffusionPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    from models.diffusion import make

    folder = tmp_path_factory.mktemp("styles")
    for name, rank, modules in (("style", 4, ["to_q", "to_v", "to_out.0"]), ("pose", 3, ["to_k", "ff.net.2"])):
        pipeline = make("sd")
        pipeline.unet.add_adapter(LoraConfig(r=rank, target_modules=modules, init_lora_weights=False), name)
        states = [get_peft_model_state_dict(pipeline.unet, adapter_name=name)]
        if name == "style":
            config = LoraConfig(r=rank, target_modules=["q_proj", "fc1"], init_lora_weights=False)
            pipeline.text_encoder.add_adapter(config, name)
            states.append(get_peft_model_state_dict(pipeline.text_encoder, adapter_name=name))
        StableDiffusionPipeline.save_lora_weights(folder / name, *states)
    return {name: folder / name for name in ("style", "pose")}


def test_adapters_are_those_of_diffusers(
    exported: Callable[[str], Path], styles: Mapping[str, Path], tmp_path: Path
) -> None:
    """Loaded by the same calls, from a file and from tensors; one, the sum of two, and none after they are unloaded."""
    from safetensors.torch import load_file

    from models.diffusion import make

    request = Request(split_mode="tensor", lora_slots=8)
    plan = plan_pipeline(exported("sd"), ["te=cpu0,diffusion=cpu0&cpu1,vae=cpu0"], request)
    compile_pipeline(plan, tmp_path / "package")
    whole, made = make("sd"), load(tmp_path / "package")
    plain = draw(made, height=64, width=64)

    def compare(both: bool, **options: Any) -> None:
        expected = draw(whole, height=64, width=64, **options)
        assert both == (np.abs(expected - plain).max() > 0.05)
        np.testing.assert_allclose(draw(made, height=64, width=64, **options), expected, rtol=0, atol=CLOSE)

    for pipeline in (whole, made):
        pipeline.load_lora_weights(styles["style"], adapter_name="style")
    compare(True)
    for pipeline in (whole, made):
        pipeline.load_lora_weights(load_file(styles["pose"] / "pytorch_lora_weights.safetensors"), adapter_name="pose")
        pipeline.set_adapters(["style", "pose"], [0.7, {"unet": 0.4}])
    assert made.get_list_adapters() == whole.get_list_adapters()
    assert set(made.get_active_adapters()) == set(whole.get_active_adapters())
    compare(True)
    compare(True, cross_attention_kwargs={"scale": 1.5})  # of the text encoder's too
    compare(True)
    for pipeline in (whole, made):
        pipeline.delete_adapters("style")
        pipeline.unload_lora_weights()
    compare(False)
    np.testing.assert_array_equal(draw(made, height=64, width=64), plain)


def test_adapters_that_are_refused(sd: Path, styles: Mapping[str, Path], tmp_path: Path) -> None:
    pipeline = load(sd)
    with pytest.raises(MisuseError, match=r"a part for text_encoder, which has no slots for adapters"):
        pipeline.load_lora_weights(styles["style"])
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: pipeline.load_lora_weights(tmp_path / "none"), "does not exist"),
        (lambda: pipeline.load_lora_weights({}), "the adapter that was given has no matrices"),
        (lambda: pipeline.load_lora_weights(styles["style"], hotswap=True), "has no option 'hotswap'"),
        (lambda: pipeline.set_adapters("style"), "no adapter 'style' is loaded: there are none"),
        (lambda: pipeline.set_adapters(["a", "b"], [1.0]), "2 adapters and 1 weights"),
        (lambda: pipeline.fuse_lora(), "merge adapters with splitc compile --lora"),
    ]
    for call, why in calls:
        with pytest.raises(MisuseError, match=why):
            call()
    assert pipeline.get_list_adapters() == {} and pipeline.get_active_adapters() == []
