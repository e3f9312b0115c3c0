"""How large the page of ``glue view`` is, and how long it takes to make and to open, for the model of the demo.

    python -m benchmarks.view_page [--layers 4 28] [--browser /usr/bin/chromium] [--screenshot FILE]

Opening is from the navigation to the first drawn rows, in a headless browser with an empty profile each time, driven by
playwright. The step is compiled with ``compiler="aot_eager"``: what comes below glue is not in the page.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUNS = 5


def dump(folder: Path, layers: int) -> None:
    """One training step of the demo's model, dumped."""
    import torch

    from demo.packed_model import packed_batches, packed_qwen3

    torch._dynamo.reset()
    model = packed_qwen3(layers=layers, hidden=64)
    options = {"compiler": "aot_eager", "dump": str(folder)}
    compiled = torch.compile(model, backend="glue", options=options)
    compiled(**packed_batches(1, tokens=128)[0]).loss.backward()


def make(folder: Path) -> tuple[Path, float]:
    """The page of a dump, and the seconds that it took."""
    from glue_compiler.report.page import render_page
    from glue_compiler.report.page_data import page_data
    from glue_compiler.report.recorded import read_folder

    start = time.perf_counter()
    path = folder / "view.html"
    path.write_text(render_page(page_data(read_folder(folder))), encoding="utf-8")
    return path, time.perf_counter() - start


def open_page(path: Path, browser: Any, screenshot: Path | None) -> tuple[float, int]:
    """Milliseconds until rows are drawn, and the most bytes of JavaScript heap."""
    context = browser.new_context(viewport={"width": 1280, "height": 640})
    page = context.new_page()
    page.goto(path.as_uri(), wait_until="commit")
    page.wait_for_selector("body[data-ready] .row", state="attached")
    # performance.now() counts from the start of the navigation; a frame later the rows are on the screen.
    opened = page.evaluate(
        "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
    )
    heap = page.evaluate("performance.memory.usedJSHeapSize")
    if screenshot:
        page.keyboard.press("n")
        page.screenshot(path=screenshot)
    context.close()
    return opened, heap


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 28])
    parser.add_argument("--browser", default=os.environ.get("GLUE_TEST_BROWSER") or shutil.which("chromium"))
    parser.add_argument("--screenshot", type=Path, help="of the first model's page")
    parser.add_argument("--keep", type=Path, help="keep dumps and pages in this folder")
    given = parser.parse_args(arguments)
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as driver:
        print("layers  nodes  dump MiB  page MiB  make s  open ms (median, most)  heap MiB")
        for number, layers in enumerate(given.layers):
            folder = (given.keep or Path(temporary)) / f"layers_{layers}"
            folder.mkdir(parents=True, exist_ok=True)
            dump(folder, layers)
            path, seconds = make(folder)
            browser = driver.chromium.launch(executable_path=given.browser, args=["--no-sandbox", "--disable-gpu"])
            shot = given.screenshot if number == 0 else None
            opened, heaps = zip(*(open_page(path, browser, None if run else shot) for run in range(RUNS)), strict=True)
            browser.close()
            nodes = path.read_text(encoding="utf-8").split('"nodesBefore":')[1].split(",")[0]
            dumped = sum(file.stat().st_size for file in folder.rglob("*.py"))
            print(
                f"{layers:6}  {nodes:>5}  {dumped / 2**20:8.1f}  {path.stat().st_size / 2**20:8.2f}  {seconds:6.1f}"
                f"  {statistics.median(opened):7.0f}, {max(opened):4.0f}           {max(heaps) / 2**20:8.1f}"
            )


if __name__ == "__main__":
    main()
