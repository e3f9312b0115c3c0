"""FlashAttention 4 is another package's: what glue calls it with."""

from __future__ import annotations

import importlib
import os
import sys

import pytest
import torch

from glue_compiler.ops import flash_attn4, optional_package


@pytest.mark.parametrize(
    ("window", "wanted"),
    [((-1, -1), (False, None, None)), ((-1, 0), (True, None, None)), ((9, 0), (False, 9, 0)), ((9, 9), (False, 9, 9))],
)
def test_windows_are_told_in_the_packages_words(window, wanted):
    arguments = flash_attn4._arguments(None, 8, window, 0.5)
    assert tuple(arguments[name] for name in ("causal", "window_size_left", "window_size_right")) == wanted


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """What the package's import finds in the environment."""
    found = {}

    def why_unusable(*_):
        found.update({name: os.environ.get(name) for name in flash_attn4._ON_DISK})

    for name in flash_attn4._ON_DISK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(optional_package, "installed_version", lambda package: "4.0.0")
    monkeypatch.setattr(optional_package, "why_unusable", why_unusable)
    flash_attn4.unusable.cache_clear()
    yield found
    flash_attn4.unusable.cache_clear()


ENABLED, FOLDER = flash_attn4._ON_DISK


def test_kernels_are_kept_beside_inductors(seen, tmp_path):
    flash_attn4.unusable()
    assert seen == {ENABLED: "1", FOLDER: str(tmp_path / "kernels" / "flash_attn4")}
    assert (tmp_path / "kernels" / "flash_attn4").is_dir()
    assert not any(name in os.environ for name in flash_attn4._ON_DISK)


def test_what_the_user_says_stays(seen, monkeypatch):
    monkeypatch.setenv(ENABLED, "0")
    flash_attn4.unusable()
    assert seen == {ENABLED: "0", FOLDER: None}
    assert os.environ[ENABLED] == "0"


def test_a_package_that_is_imported_already_has_decided(seen, monkeypatch):
    monkeypatch.setitem(sys.modules, flash_attn4._MODULE, None)
    flash_attn4.unusable()
    assert seen == {ENABLED: None, FOLDER: None}


def test_a_folder_that_cannot_be_made(seen, monkeypatch, tmp_path):
    (tmp_path / "kernels").write_text("a file")
    flash_attn4.unusable()
    assert seen == {ENABLED: None, FOLDER: None}


@pytest.mark.parametrize(
    ("tokens", "implementation", "captures", "expected"),
    [
        (2048, "flash4", False, False),
        (4096, "flash4", False, True),
        (2048, "flash4", True, True),
        (4096, "flash2", False, False),
        (4096, "flash2", True, False),
    ],
)
def test_a_small_step_does_not_wait_for_its_python(monkeypatch, tokens, implementation, captures, expected):
    varlen = importlib.import_module("glue_compiler.ops.varlen_attention")
    monkeypatch.setattr(varlen, "is_capturing", lambda: captures)
    imports = []
    monkeypatch.setattr(flash_attn4, "unusable", lambda: imports.append(1))
    query = torch.empty(tokens, 32, 128, device="meta", dtype=torch.bfloat16)
    assert varlen._is_worth_flash4(query, implementation) is expected
    assert len(imports) == expected, "the package is imported for what it runs, and nothing else"
    monkeypatch.setattr(flash_attn4, "unusable", lambda: "it cannot be imported")
    assert varlen._is_worth_flash4(query, implementation) is False
