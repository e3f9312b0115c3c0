"""``"glue"`` as a name for accelerate and transformers, in a fresh process that imports nothing of glue's."""

import os
import subprocess
import sys

import pytest

from tests.slow import one_in

pytest.importorskip("accelerate")


def run(code, **variables):
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **variables}, timeout=300
    )
    return found.stdout.strip().splitlines()[-1] if found.returncode == 0 else found.stderr


PLUGIN = """
from accelerate.utils import TorchDynamoPlugin, DynamoBackend
print(TorchDynamoPlugin(backend="glue").to_kwargs()["backend"], "GLUE" in DynamoBackend.list())
"""


def test_accelerate_knows_the_name():
    assert run(PLUGIN) == "glue True"


@pytest.mark.parametrize(
    "imported_first", one_in(3, ["torch", "accelerate", "accelerate.utils.dataclasses", "transformers"])
)
def test_whatever_is_imported_first(imported_first):
    assert run(f"import {imported_first}\n{PLUGIN}") == "glue True"


def test_it_can_be_switched_off():
    assert "ValueError" in run(PLUGIN, GLUE_ACCELERATE="0")


def test_another_unknown_name_is_still_an_error():
    assert "ValueError" in run(PLUGIN.replace('"glue"', '"gleu"'))


def test_the_launcher_takes_the_name():
    code = """
from accelerate.commands.launch import launch_command_parser
print(launch_command_parser().parse_args(["--dynamo_backend", "glue", "script.py"]).dynamo_backend)
"""
    assert run(code) == "glue"


@pytest.mark.slow
def test_an_accelerator_compiles_with_glue():
    code = """
import torch
from accelerate import Accelerator
model = Accelerator(dynamo_backend="glue", cpu=True).prepare(torch.nn.Linear(2, 2))
model(torch.ones(1, 2))
from glue_compiler.backend import glue
print(len(glue.frames))
"""
    assert run(code, GLUE_COMPILER="aot_eager") == "1"
