"""FlashAttention 4 is another package's: what glue says where it is not there, or is not as it was."""

from __future__ import annotations

import types

import pytest

from glue_compiler.ops import flash_attn4, optional_package


@pytest.fixture(autouse=True)
def _asked_anew():
    flash_attn4.unusable.cache_clear()
    yield
    flash_attn4.unusable.cache_clear()


def installed(monkeypatch, load):
    monkeypatch.setattr(optional_package, "installed_version", lambda package: "4.0.0")
    monkeypatch.setattr(flash_attn4.importlib, "import_module", load)


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(optional_package, "installed_version", lambda package: None)
    assert flash_attn4.unusable() == "flash-attn-4 is not installed"


def test_a_package_that_fails_when_it_is_imported(monkeypatch):
    def load(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    installed(monkeypatch, load)
    assert flash_attn4.unusable() == (
        "flash-attn-4 4.0.0 cannot be imported: OSError: libcuda.so.1: cannot open shared object file"
    )


def with_parameters(forward: set[str], backward: set[str]):
    texts = (f"lambda {', '.join(sorted(names))}: None" for names in (forward, backward))
    return types.SimpleNamespace(**dict(zip(flash_attn4._PARAMETERS, map(eval, texts), strict=True)))


def test_a_package_whose_functions_take_other_arguments(monkeypatch):
    forward, backward = flash_attn4._PARAMETERS.values()
    installed(monkeypatch, lambda name: with_parameters(forward, backward - {"dout", "lse"}))
    assert flash_attn4.unusable() == (
        "_flash_attn_bwd of flash-attn-4 4.0.0 takes no dout, lse; a newer glue may know it"
    )


def test_a_package_that_is_as_it_was(monkeypatch):
    installed(monkeypatch, lambda name: with_parameters(*flash_attn4._PARAMETERS.values()))
    assert flash_attn4.unusable() is None


@pytest.mark.parametrize(
    ("window", "wanted"),
    [((-1, -1), (False, None, None)), ((-1, 0), (True, None, None)), ((9, 0), (False, 9, 0)), ((9, 9), (False, 9, 9))],
)
def test_windows_are_told_in_the_packages_words(window, wanted):
    arguments = flash_attn4._arguments(None, 8, window, 0.5)
    assert tuple(arguments[name] for name in ("causal", "window_size_left", "window_size_right")) == wanted
