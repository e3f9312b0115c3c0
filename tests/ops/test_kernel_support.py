"""What kernels ask of torch's settings."""

from __future__ import annotations

import pytest
import torch

from glue_compiler.ops.kernel_support import product_precision


@pytest.fixture(autouse=True)
def _settings_as_they_were():
    matmul = torch.backends.cuda.matmul
    before = torch.backends.fp32_precision, matmul.fp32_precision
    yield
    torch.backends.fp32_precision, matmul.fp32_precision = before


def test_tf32_is_what_torchs_products_have():
    assert product_precision(torch.float32) == "ieee"
    torch.set_float32_matmul_precision("high")
    assert product_precision(torch.float32) == "tf32"
    assert product_precision(torch.float16) == product_precision(torch.float64) == "ieee"
    torch.set_float32_matmul_precision("highest")
    assert product_precision(torch.float32) == "ieee"


@pytest.mark.parametrize("owner", [torch.backends, torch.backends.cuda.matmul], ids=["all", "products"])
def test_it_may_be_said_in_torchs_newer_way(owner):
    """After which reading ``allow_tf32`` is an error."""
    owner.fp32_precision = "tf32"
    assert product_precision(torch.float32) == "tf32"
    owner.fp32_precision = "ieee"
    assert product_precision(torch.float32) == "ieee"
