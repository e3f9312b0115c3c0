"""One HTML file that shows a whole dump: no network, no framework."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def render_page(data: dict[str, Any]) -> str:
    """The page for what :func:`glue_compiler.report.page_data.page_data` gives.

    Its content security policy forbids every connection, so that opening it tells nobody anything.
    """
    parts = files("glue_compiler.report") / "page"
    # "<" could end the script element.
    encoded = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = (parts / "page.html").read_text(encoding="utf-8")
    for mark, text in (
        ("/*STYLE*/", (parts / "page.css").read_text(encoding="utf-8")),
        ("/*SCRIPT*/", (parts / "page.js").read_text(encoding="utf-8")),
        ("/*DATA*/", encoded),  # last: nothing in the data is replaced
    ):
        before, after = page.split(mark, 1)
        page = before + text + after
    return page
