"""The page of ``glue view`` in a headless browser: what a reader does, by mouse and by keyboard."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("typer")

from glue_compiler.report.page import render_page
from glue_compiler.report.page_data import page_data
from glue_compiler.report.recorded import read_folder
from tests.passes.overlap_offload.models import Blocks, step

BROWSER = os.environ.get("GLUE_TEST_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)


class Model(Blocks):
    """Checkpointed blocks that repeat an integer sum and wait for it."""

    def forward(self, x, positions):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(self.masked, block, x, positions, use_reentrant=False)
        return self.head(x) + torch.rand_like(x[:, :1]) + torch.rand_like(x[:, :1])

    @staticmethod
    def masked(block, x, positions):
        starts = (positions == 0).nonzero()
        return block(x) * starts.sum()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    options = {"compiler": "aot_eager", "dump": str(folder), "offload": "checkpoints"}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("GLUE_")]:
            patch.delenv(name)
        torch._dynamo.reset()
        model = Model(4)
        step(torch.compile(model, backend="glue", options=options), model, torch.randn(4, 8), torch.arange(4) % 2)
        torch._dynamo.reset()
    target = folder / "view.html"
    target.write_text(render_page(page_data(read_folder(folder))), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright to drive a browser")
    if BROWSER is None:
        pytest.skip("needs a browser: Debian's chromium, or GLUE_TEST_BROWSER=path")
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, page_file):
    """The open page; whatever it writes to the console, and any request, is a failure."""
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    problems = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or problems.append(request.url))
    page.goto(page_file.as_uri())
    page.wait_for_selector("body[data-ready]")
    yield page
    page.close()
    assert problems == []


def selected(page):
    return page.inner_text('.row[aria-selected="true"]')


def current(page):
    return page.inner_text('nav [aria-current="true"] span:first-child')


def test_it_opens_at_the_first_pass_that_changed_something(page):
    assert current(page) == "hoist_metadata"
    assert page.locator(".row.removed").count() > 0
    assert page.get_attribute("#tab-diff", "aria-selected") == "true"


def test_search_finds_a_node_and_shows_its_source_line(page):
    page.keyboard.press("/")
    page.keyboard.type("NONZERO")
    assert "found" in page.inner_text("#matches")
    page.keyboard.press("Enter")
    assert "nonzero" in selected(page)
    assert "test_page.py:" in selected(page)
    assert "test_page.py:" in page.inner_text("#details .source")
    assert "(positions == 0).nonzero()" in page.inner_text("#details")
    first = page.inner_text("#matches")
    page.keyboard.press("Enter")
    assert page.inner_text("#matches") != first
    page.keyboard.press("Shift+Enter")
    assert page.inner_text("#matches") == first


def test_search_for_what_is_not_there_finds_nothing(page):
    page.fill("#search", "no such node")
    assert page.inner_text("#matches") == "0 found"
    page.keyboard.press("Enter")
    assert page.locator('.row[aria-selected="true"]').count() == 0


def test_keys_and_clicks_switch_passes(page):
    page.keyboard.press("]")
    assert current(page) == "memoize_metadata"
    page.keyboard.press("[")
    assert current(page) == "hoist_metadata"
    page.click("nav button:has-text('group_experts')")
    assert current(page) == "group_experts"
    assert "nothing for this pass to do" in page.inner_text("#panel")


def test_arrows_and_n_move_through_the_nodes(page):
    page.keyboard.press("n")
    change = page.locator('.row[aria-selected="true"]')
    assert "same" not in change.get_attribute("class").split()
    before = selected(page)
    page.keyboard.press("ArrowDown")
    assert selected(page) != before
    page.keyboard.press("ArrowUp")
    assert selected(page) == before
    page.keyboard.press("End")
    page.keyboard.press("Home")
    assert page.locator('.row[aria-selected="true"]').is_visible()


def test_changes_only_hides_equal_nodes_far_from_a_change(page):
    def rows():
        return page.evaluate("rows.filter((row) => row.kind).length")

    few = rows()
    page.keyboard.press("c")
    assert rows() > few
    page.keyboard.press("c")
    assert rows() == few


def test_a_layer_filters_the_nodes(page):
    page.keyboard.press("c")
    page.select_option("#layer", "blocks.2")
    layers = page.evaluate(
        "rows.filter((row) => row.kind).map((row) => field(row.before >= 0 ? row.before : row.after, LAYER))"
    )
    assert layers
    assert all(layer.split(".")[:2] == ["blocks", "2"] for layer in layers)


def test_rows_out_of_sight_are_not_in_the_page(page):
    page.keyboard.press("c")
    assert page.evaluate("rows.length") > page.locator(".row").count()
    page.keyboard.press("End")
    assert page.locator('.row[aria-selected="true"]').is_visible()


def test_skips_have_their_reasons(page):
    page.click("#tab-skips")
    assert "random" in page.inner_text("#panel")
    assert "test_page.py:" in page.inner_text("#panel")


def test_a_host_sync_leads_to_its_node(page):
    page.click("#tab-syncs")
    assert "once per batch" in page.inner_text("#panel")
    page.locator("#panel tr:has-text('nonzero') button").click()
    assert current(page) == "memoize_metadata"
    assert "nonzero" in selected(page)


def test_the_streams_of_checkpoint_offload_lead_to_their_nodes(page):
    page.click("nav button:has-text('overlap_offload')")
    page.click("#tab-timeline")
    copies = page.locator('rect[aria-label^="copy to host"]')
    assert copies.count() == page.locator('rect[aria-label^="copy from host"]').count() == 3
    copies.first.focus()
    page.keyboard.press("Enter")
    assert "offload_start" in selected(page)


def test_the_keys_are_told(page):
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()


def test_the_address_keeps_the_place(page, page_file):
    page.click("nav button:has-text('overlap_offload')")
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert current(page) == "overlap_offload"
