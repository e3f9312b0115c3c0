"""A large card as a smaller one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.card_memory import allocator_settings
from glue_compiler.errors import GlueOptionError
from glue_compiler.ops import device_memory


@pytest.fixture
def of_80(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))


@pytest.mark.usefixtures("of_80")
def test_a_process_gets_the_part_of_the_card_that_is_asked_for(monkeypatch):
    assert allocator_settings(None) == "expandable_segments:True"
    assert allocator_settings("20GiB") == "expandable_segments:True,per_process_memory_fraction:0.2500"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert allocator_settings("40GiB") == "max_split_size_mb:64,per_process_memory_fraction:0.5000"


@pytest.mark.usefixtures("of_80")
def test_a_card_of_more_memory_is_refused():
    with pytest.raises(GlueOptionError, match="the card here has"):
        allocator_settings("96GiB")


@pytest.mark.usefixtures("of_80")
def test_glue_plans_with_what_the_process_may_hold(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.25)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 << 30)
    assert device_memory.size_of.__wrapped__(device) == 20 << 30
    assert device_memory.memory_of(device) == device_memory.DeviceMemory(20 << 30, 14 << 30, 2 << 30)
