"""FlashAttention 4 is another package's: what glue calls it with."""

from __future__ import annotations

import pytest

from glue_compiler.ops import flash_attn4


@pytest.mark.parametrize(
    ("window", "wanted"),
    [((-1, -1), (False, None, None)), ((-1, 0), (True, None, None)), ((9, 0), (False, 9, 0)), ((9, 9), (False, 9, 9))],
)
def test_windows_are_told_in_the_packages_words(window, wanted):
    arguments = flash_attn4._arguments(None, 8, window, 0.5)
    assert tuple(arguments[name] for name in ("causal", "window_size_left", "window_size_right")) == wanted
