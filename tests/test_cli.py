"""The command as a user runs it: what it prints, and how it ends."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from models.llama import build, save_sparse
from models.writer import Writer, save
from splitc.runtime.arrays.files import save_arrays
from splitc.runtime.package.files import hash_file
from tests.conftest import DECODER, assert_close, decoder_feeds, listen_to_interrupts, run_whole
from tests.helpers.command import SCRIPT, splitc, splitc_process

LAYERS = ("--split-mode", "layer")


def test_compile_run_check_bench_inspect(decoder: Path, tmp_path: Path) -> None:
    package, feeds = tmp_path / "package", decoder_feeds()
    compiled = splitc(
        "compile", decoder, "-o", package, "-d", "cpu0", "-d", "cpu1", *LAYERS, "--shapes", "input_ids:2x3"
    )
    assert "prologue..layers.0 (2)" in compiled.stdout
    assert "cut 0-1" in compiled.stdout
    save_arrays(tmp_path / "in.npz", feeds)
    splitc("run", package, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz")
    assert_close(dict(np.load(tmp_path / "out.npz")), run_whole(decoder, feeds))
    assert "5 of 5 outputs agree" in splitc("check", package, "--model", decoder, "--no-memory").stdout
    ids = np.arange(3)[None]
    np.savez(tmp_path / "prompt.npz", input_ids=ids, attention_mask=np.ones_like(ids), position_ids=ids)
    checked = splitc("check", package, "-m", decoder, "--no-memory", "--inputs", tmp_path / "prompt.npz").stdout
    assert "5 of 5 outputs agree" in checked, "states that are not fed begin empty, in the model too"
    timed = splitc("bench", package, "--baseline", decoder, "--runs", 3, "--threads", 2, "--no-memory").stdout
    assert [line.split()[1] for line in timed.splitlines() if line.startswith("unsplit")] == ["4", "2"]
    assert "layer mode, 2 ranks" in splitc("inspect", package).stdout


def test_results_as_json(decoder: Path, package: Path, tmp_path: Path) -> None:
    files = json.loads(splitc("inspect", package, "--rank", 1, "--json").stdout)["files"]
    assert list(files) == ["manifest.json", "rank1/stage1.onnx", "rank1/stage1.weights"]
    assert all((package / name).stat().st_size == size for name, size in files.items())
    assert "rank1/stage1.weights" in splitc("inspect", package, "--rank", 1).stdout
    assert "--rank is 3" in splitc("inspect", package, "--rank", 3, code=2).stderr
    facts = json.loads(splitc("inspect", package, "--json").stdout)
    assert facts["split_mode"] == "layer"
    assert facts["blocks"] == 4
    assert len(facts["ranks"]) == 3
    assert facts["cut_bytes"] == [16 * 64 * 4] * 2
    assert {"device", "weights_bytes", "activation_bytes", "cache_bytes", "blocks", "engines"} <= set(facts["ranks"][0])
    assert (facts["collectives"], facts["unsplit"], facts["engine"]) == (0, [], "onnxruntime")
    assert json.loads(splitc("devices", "--json").stdout)[0]["total_bytes"] > 0
    assert json.loads(splitc("plan", decoder, "-d", "2xcpu", *LAYERS, "--json").stdout)["blocks"]["layers.1"] == 1
    checked = json.loads(splitc("check", package, "-m", decoder, "--json").stdout)
    assert all(output["passed"] for output in checked["outputs"])
    assert [rank["predicted_weights"] for rank in checked["memory"]] == [r["weights_bytes"] for r in facts["ranks"]]
    assert all(rank["peak"] >= rank["loaded"] > 0 for rank in checked["memory"])
    timed = json.loads(splitc("bench", package, "--runs", 2, "--no-memory", "--json").stdout)
    assert [rank["device"] for rank in timed["time"]["ranks"]] == ["cpu0", "cpu1", "cpu2"]
    result = splitc("compile", decoder, "-o", tmp_path / "p", "-d", "cpu0&cpu1", *LAYERS, "--json")
    assert json.loads(result.stdout)["split_mode"] == "layer"


def test_plan_is_edited_and_compiled(decoder: Path, tmp_path: Path) -> None:
    plan, package = tmp_path / "plan.json", tmp_path / "package"
    splitc("plan", decoder, "-d", "3xcpu", *LAYERS, "-o", plan)
    plan.write_text(plan.read_text().replace('"layers.1": 1', '"layers.1": 0'))
    splitc("compile", decoder, "--plan", plan, "-o", package)
    assert json.loads(splitc("inspect", package, "--json").stdout)["ranks"][0]["blocks"][-1] == "layers.1"


def test_outputs_that_differ_end_with_4(package: Path, tmp_path: Path) -> None:
    model = build(DECODER)
    weight = model.graph.initializers["model.layers.1.mlp.up_proj.weight"]
    weight.const_value = ir.tensor(np.zeros((64, 160), np.float32), name=weight.name)
    save(model, tmp_path / "other.onnx")
    result = splitc("check", package, "--model", tmp_path / "other.onnx", "--no-memory", code=4)
    assert "outputs differ beyond tolerance: logits" in " ".join(result.stderr.split())
    assert "differs" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["compile", "none.onnx", "-o", "p", "-d", "cpu0"], 2, "no such model file"),
        (["compile", "MODEL", "-o", "p", "-d", "gpu7"], 2, "unknown device 'gpu7': there are cpu0"),
        (["compile", "MODEL", "-o", "p"], 2, "no device given"),
        (["compile", "MODEL", "-o", "p", "-d", "500xcpu", *LAYERS], 1, "500 devices, and the model can be cut into"),
        (
            ["compile", "MODEL", "-o", "p", "-d", "2xcpu", "--memory", "100KiB", *LAYERS],
            3,
            "the devices have 0 B beside their engines",
        ),
        (["compile", "MODEL", "-o", "p", "-d", "2xcpu", "--memory", "cpu7=1GiB"], 2, "the devices are cpu0, cpu1"),
        (["compile", "MODEL", "-o", "p", "-d", "2xcpu", "--memory", "much"], 2, "as an amount of memory"),
        (["compile", "MODEL", "-o", "p", "-d", "cpu0", "--shapes", "idz:1x2"], 2, "the model has no such input"),
        (["compile", "MODEL", "-o", "p", "-d", "cpu0", "--shapes", "1x2"], 2, "write NAME:1x16"),
        (["compile", "MODEL", "-o", "PACKAGE", "-d", "cpu0"], 2, "exists already"),
        (["compile", "MODEL", "-o", "PACKAGE", "-d", "cpu0", "--weights", "x"], 2, "unknown --weights 'x': there are"),
        (["compile", "MODEL", "-o", "p", "-d", "2xcpu", "--tensor-split", "1,2,3"], 2, "3 shares, and there are 2"),
        (["compile", "MODEL", "-o", "p", "-d", "2xcpu", "--tensor-split", "1,x"], 2, "one number a device"),
        (["compile", "MODEL", "-o", "p", "-d", "2xcpu", "--split-mode", "diagonal"], 2, "unknown split mode"),
        (["compile", "MODEL", "-o", "p", "--plan", "plan.json"], 2, "no such plan"),
        (["plan", "MODEL", "-d", "cpu0", "--objective", "beauty"], 2, "unknown objective"),
        (["compile", "none.onnx", "-o", "p", "--split-mode", "x=tensor"], 2, "no such model file"),
        (["generate", "none", "--prompt", "text"], 2, "none does not exist"),
        (["run", "PACKAGE", "--inputs", "x.npz", "--outputs", "y.npz"], 2, "no such file: x.npz"),
        (["run", "PACKAGE", "--inputs", "x.npz"], 2, "no such file: x.npz"),
        (["check", "none", "--inputs", "x.npz"], 2, "none does not exist"),
        (["check", "PACKAGE", "--inputs", "x.npz"], 2, "no such file: x.npz"),
        (["generate", "FOLDER", "--prompt", "text"], 2, "has no manifest.json, so it is no package"),
        (["generate", "PACKAGE", "--prompt", "text", "--module", "x"], 2, "and has no module 'x'"),
        (["export"], 2, "missing argument 'SERVER'"),
        (["export", "openai", "PACKAGE", "--tokenizer", "none"], 2, "no such tokenizer: none"),
        (["compile", "none.onnx"], 2, "no such model file: none.onnx"),
        (["compile", "MODEL", "--plan", "plan.json"], 2, "no such plan: plan.json"),
        (["compile", "none.onnx", "--export"], 2, "missing option '--output'"),
        (["plan", "MODEL", "-d", "cpu0", "-o", "MODEL"], 2, "would be overwritten, which is read"),
        (["plan", "MODEL", "-d", "cpu0", "-o", "DATA"], 2, "would be overwritten, which is read"),
        (["run", "PACKAGE", "--inputs", "DATA", "--outputs", "DATA"], 2, "would be overwritten, which is read"),
        (["run", "PACKAGE", "--inputs", "DATA", "--outputs", "PACKAGE"], 2, "it is a folder"),
        (
            ["run", "PACKAGE", "--inputs", "DATA", "--outputs", "y.csv"],
            2,
            "are written as .npz, or as .json, and not as .csv",
        ),
        (["bench", "PACKAGE", "--baseline", "MODEL", "--trace", "MODEL"], 2, "would be overwritten, which is read"),
        (["bench", "PACKAGE", "--baseline", "MODEL", "--trace", "DATA"], 2, "would be overwritten, which is read"),
        (["check", "PACKAGE", "MODEL", "--report", "DATA"], 2, "would be overwritten, which is read"),
        (["bench", "PACKAGE", "--before", "DATA", "--report", "DATA"], 2, "would be overwritten, which is read"),
        (["bench", "PACKAGE", "--trace", "p", "--report", "p"], 2, "--report and --trace are both"),
        (["plan", "MODEL", "-d", "cpu0", "-o", "p", "--report", "p"], 2, "--output and --report are both"),
        (["inspect", "none"], 2, "none does not exist"),
        (["export", "triton", "PACKAGE", "-o", "PACKAGE"], 2, "would be written into"),
        (["export", "triton", "PACKAGE", "-o", "p", "--name", ""], 2, "can't be a model's name"),
        (["export", "triton", "PACKAGE", "-o", "p", "--idle", "inf"], 2, "invalid value for '--idle'"),
        (["export", "triton", "PACKAGE", "-o", "p", "--no-sequences", "--idle", "5"], 2, "--idle ends sequences"),
        (["generate", "PACKAGE", "--prompt-ids", "5", "--top-k", "5"], 2, "no effect without --temperature"),
        (["check", "PACKAGE", "--model", "none.onnx"], 2, "no such model file"),
        (["check", "PACKAGE", "--model", "OTHER", "--no-memory"], 2, "takes 'other', and the package does not"),
        (["bench", "PACKAGE", "--baseline", "OTHER", "--runs", "1"], 2, "takes 'other', and the package does not"),
        (["plan", "FOLDER", "-d", "cpu0"], 1, "has no ONNX file in it"),
        (["plan", "/dev/null", "-d", "cpu0"], 1, "is no regular file"),
        (["frobnicate"], 2, "error: no such command 'frobnicate'"),
        (["check", "PACKAGE"], 2, "error: no model to compare with: give the unsplit one"),
        (["check", "PACKAGE", "OTHER", "--no-memory"], 2, "takes 'other', and the package does not"),
        (["check", "PACKAGE", "OTHER", "-m", "MODEL"], 2, "two models to compare with"),
        (["plan", "MODEL", "-d", "cpu0", "--memory", "4"], 2, "is 4GiB meant, or 4B?"),
        (
            ["plan", "MODEL", "-d", "2xcpu", "--split-mode", "x=tensor"],
            2,
            "a mode with a name is for a model of a folder",
        ),
    ],
)
def test_mistakes_end_in_one_message(
    decoder: Path, package: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    data = decoder.with_name(f"{decoder.name}.data")
    before = hash_file(decoder), hash_file(data)
    w = Writer()
    w.output(w.op("Relu", w.input("other", ir.DataType.FLOAT, ["n"])), "y", ir.DataType.FLOAT, ["n"])
    save(w.model(), tmp_path / "other.onnx")
    (tmp_path / "empty").mkdir()
    files = {"OTHER": tmp_path / "other.onnx", "FOLDER": tmp_path / "empty", "p": tmp_path / "p"}
    places = {"MODEL": decoder, "DATA": data, "PACKAGE": package, **files}
    result = splitc(*(places.get(word, word) for word in arguments), code=code)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "p").exists()
    assert before == (hash_file(decoder), hash_file(data))


def test_command_of_a_plan_can_be_pasted(decoder: Path, tmp_path: Path) -> None:
    plan, package = tmp_path / "a plan.json", tmp_path / "package"
    said = splitc("plan", decoder, "-d", "2xcpu", *LAYERS, "-o", plan).stdout.splitlines()[-1]
    command = shlex.split(said.partition(": ")[2].replace("PACKAGE", str(package)))
    splitc(*command[1:], "--no-verify")
    assert package.is_dir()


def test_mistakes_end_the_process(package: Path, tmp_path: Path) -> None:
    """With the same codes as in this process. Commands that compile are left out, as they take longest to start."""
    module = (sys.executable, "-m", "splitc.runtime")
    assert "see: splitc help run\n" in splitc_process("run", package, start=module, code=2).stderr
    short = (sys.executable, "-OO", "-m", "splitc")
    assert splitc_process("run", "-h", start=short).stdout.startswith("Usage: python -m splitc run [OPTIONS] PACKAGE")
    (tmp_path / "manifest.json").write_text("{")
    assert "manifest.json" in splitc_process("inspect", tmp_path, code=1).stderr


def test_killed_compile_leaves_no_package(tmp_path: Path) -> None:
    """The model is large, so that the signal comes while its weights are written."""
    w, size = Writer(), 4096
    x = w.input("x", ir.DataType.FLOAT, ["n", size])
    for name in "AB":
        x = w.op("MatMul", x, w.weight(name, ir.tensor(np.zeros((size, size), np.float32))))
    w.output(x, "y", ir.DataType.FLOAT, ["n", size])
    save_sparse(w.model(), tmp_path / "model.onnx")
    command = [SCRIPT, "compile", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "package"), "-d", "2xcpu", *LAYERS]
    for number in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=listen_to_interrupts,
        )
        while not list(tmp_path.glob(".package.partial/rank0/*")) and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
        assert process.returncode != 0
        assert "Traceback" not in error
        assert not (tmp_path / "package").exists()
        # A process can't handle SIGKILL: the next compile removes what is left.
        assert number == signal.SIGKILL or not list(tmp_path.glob(".package*"))
    splitc(*command[1:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data", "package"]


def test_damaged_package_is_refused(package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(package, copy)
    (copy / "rank1" / "stage1.weights").write_bytes(b"short")
    save_arrays(tmp_path / "in.npz", decoder_feeds())
    result = splitc("run", copy, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz", code=1)
    assert "stage1.weights has 5 bytes, its manifest says" in " ".join(result.stderr.split())
    assert not (tmp_path / "out.npz").exists()


def test_names_with_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    """The library that prints uses brackets for markup."""
    w = Writer()
    x = w.input("[red]x[/red]", ir.DataType.FLOAT, ["[n]", 8])
    y = w.op("MatMul", x, w.weight("[bold]w", ir.tensor(np.ones((8, 8), np.float32))))
    z = w.op("MatMul", y, w.weight("[/]v", ir.tensor(np.ones((8, 8), np.float32))))
    w.output(z, "[/y]", ir.DataType.FLOAT, ["[n]", 8])
    model, package = tmp_path / "[link=a]m.onnx", tmp_path / "[i]p"
    save(w.model(), model)
    said = splitc("compile", model, "-d", "2xcpu", "--split-mode", "layer", "-o", package).stdout
    assert "[i]p" in said
    shown = splitc("inspect", package).stdout
    for name in ("[red]x[/red]", "[/y]", "[link=a]m.onnx"):
        assert name in shown
    assert "[/y]" in splitc("check", package, "--model", model, "--no-memory").stdout
    splitc("bench", package, "--runs", "1", "--no-memory")
    given, made = tmp_path / "in.npz", tmp_path / "out.npz"
    save_arrays(given, {"[red]x[/red]": np.ones((1, 8), "f4")})
    assert "[/y]" in splitc("run", package, "--inputs", given, "--outputs", made).stdout
    assert "[red]x[/red]" in splitc("run", package, "--inputs", made, "--outputs", tmp_path / "o.npz", code=2).stderr
