"""Shared by all tests: a clean Dynamo, and a GPU marker that skips with its reason."""

import pytest
import torch


@pytest.fixture(autouse=True)
def clean_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_glue_variables(monkeypatch):
    """What is set in the developer's shell must not decide a test."""
    for name in (
        "GLUE_DUMP",
        "GLUE_DISABLE",
        "GLUE_STRICT",
        "GLUE_COMPILER",
        "GLUE_KERNELS",
        "GLUE_LOGITS",
        "GLUE_HOIST_LIMIT",
        "GLUE_MEMOIZE_THRESHOLD",
        "GLUE_OFFLOAD",
        "GLUE_PINNED_LIMIT",
        "GLUE_MEMORY_BUDGET",
        "GLUE_FUEL",
        "GLUE_VERIFY",
        "GLUE_EXTRA_PASSES",
    ):
        monkeypatch.delenv(name, raising=False)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
