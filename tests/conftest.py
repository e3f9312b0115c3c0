"""Shared by all tests: a clean Dynamo, a GPU marker that skips with its reason, and a limit of time for slow tests."""

import logging
import os
import random
import time

import pytest
import torch

BEGAN = time.monotonic()
# pytest captures what loggers that do not propagate log. This one's makes torch print each graph that it compiles.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def clean_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_glue_variables(monkeypatch):
    """What is set in the developer's shell must not decide a test."""
    for name in [name for name in os.environ if name.startswith("GLUE_")]:
        monkeypatch.delenv(name, raising=False)


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, help="slow tests run last, shuffled by --seed, until so many have passed")
    parser.addoption("--seed", type=int, default=0)


def pytest_collection_modifyitems(config, items):
    if config.getoption("minutes") is not None:
        fast, slow = ([i for i in items if ("slow" in i.keywords) == is_slow] for is_slow in (False, True))
        random.Random(config.getoption("seed")).shuffle(slow)
        items[:] = fast + slow
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))


def pytest_runtest_setup(item):
    minutes = item.config.getoption("minutes")
    if minutes is not None and "slow" in item.keywords and time.monotonic() - BEGAN > minutes * 60:
        pytest.skip(f"{minutes:g} minutes have passed")
