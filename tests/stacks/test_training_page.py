"""The scripts of docs/training.md run as they are, and glue rewrites their attention."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.stacks.tiny import transformers  # noqa: F401  skips where it, or datasets, is not installed

pytestmark = [pytest.mark.slow, pytest.mark.stack]

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
SCRIPTS = dict(re.findall(r'```python title="(\S+)"\n(.*?)```', PAGE, re.DOTALL))
NEEDS = {
    "sft.py": "trl",
    "dpo.py": "trl",
    "grpo.py": "trl",
    "lora.py": "peft",
    "qlora.py": "bitsandbytes",
    "accelerated.py": "accelerate",
    "lightning_module.py": "lightning",
}


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "small.py"])
def test_it_runs(name, report, tmp_path, monkeypatch):
    pytest.importorskip(NEEDS.get(name, "transformers"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for file in ("small.py", name):
        (tmp_path / file).write_text(SCRIPTS[file])
    torch._dynamo.reset()
    try:
        runpy.run_path(name, run_name="__main__")
    finally:
        sys.modules.pop("small", None)
    assert report.attention
    assert all(kinds.keys() == {"packed"} for kinds in report.attention)
    assert not report.skips("specialize_attention")
