"""Makes the README's pictures: reports of a plan and of a bench, as Chromium shows them.

    make pictures

It makes a decoder of 8 layers, plans and times it on CPU devices, and writes docs/pictures/.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from models.llama import Size, build
from models.writer import save
from tests.helpers.browser import Look, open_browser, picture, show
from tests.helpers.command import ROOT, splitc

PICTURES = ROOT / "docs" / "pictures"
MODEL = Size(layers=8, hidden=512, heads=8, kv_heads=4, feed_forward=1408, vocabulary=4000)
ON_CPUS = ("-d", "3xcpu", "--memory", "100MiB", "--shapes", "input_ids:1x64")
# Parts of the pages, and how many pixels of them are taken, at this width.
PLANNED, STREAMED, MOST, WIDTH = "html", "section:nth-of-type(5)", 1100, 860


def main() -> None:
    with tempfile.TemporaryDirectory() as name, open_browser() as driver:
        folder = Path(name)
        model, package, plan, bench = (folder / each for each in ("model.onnx", "package", "plan.html", "bench.html"))
        save(build(MODEL), model)
        splitc("plan", model, *ON_CPUS, "--report", plan)
        splitc("compile", model, *ON_CPUS, "--split-mode", "layer", "-o", package)
        splitc("bench", package, "--in-flight", 3, "--runs", 24, "--threads", 1, "--report", bench, "--no-memory")
        for page, part in ((plan, PLANNED), (bench, STREAMED)):
            show(driver, page, Look(WIDTH))
            picture(driver, PICTURES / f"{page.stem}.png", part, MOST)


if __name__ == "__main__":
    main()
