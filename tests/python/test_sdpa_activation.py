"""activate_sdpa and restore_sdpa: the dispatcher, torch's registry, devices."""

import subprocess
import sys

import pytest
import sdpa_cases
import torch
from flashattn_ext.integrations import sdpa as adapter
from sdpa_cases import make
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention

import flashattn_ext

torchs_own_kernels, served = sdpa_cases.torchs_own_kernels, sdpa_cases.served
needs_registry = pytest.mark.skipif(not adapter._HAS_REGISTRY, reason="torch 2.10 cannot restore")


def dispatch_tables():
    return [
        torch._C._dispatch_dump(f"aten::{name}")
        for name in adapter._OPERATORS
        if hasattr(torch.ops.aten, name)
    ]


def test_restore_brings_back_the_tables(served):
    q, k, v = make("cpu", torch.bfloat16)
    before, torchs = dispatch_tables(), scaled_dot_product_attention(q, k, v)
    for _ in range(3):
        flashattn_ext.activate_sdpa()
        flashattn_ext.activate_sdpa()
        assert dispatch_tables()[0] != before[0]
        flashattn_ext.restore_sdpa()
        assert dispatch_tables() == before
    flashattn_ext.restore_sdpa()
    assert dispatch_tables() == before
    assert torch.equal(scaled_dot_product_attention(q, k, v), torchs) and served == []


def test_without_torchs_registry(monkeypatch, served):
    """As on torch 2.10, whose registry cannot restore."""
    monkeypatch.setattr(adapter, "_HAS_REGISTRY", False)
    q, k, v = make("cpu", torch.bfloat16)
    before = dispatch_tables()
    with flashattn_ext.activate_sdpa():
        flashattn_ext.activate_sdpa()
        scaled_dot_product_attention(q, k, v)
    assert served == ["flash_fwd"]
    assert dispatch_tables() == before


def test_inner_block_leaves_the_outer_activation():
    before = dispatch_tables()
    with flashattn_ext.activate_sdpa():
        with flashattn_ext.activate_sdpa():
            pass
        assert dispatch_tables() != before
    assert dispatch_tables() == before


def test_a_block_restores_after_an_error():
    before = dispatch_tables()
    with pytest.raises(KeyError), flashattn_ext.activate_sdpa():
        raise KeyError
    assert dispatch_tables() == before


@needs_registry
def test_torchs_registry_knows():
    before = dispatch_tables()
    flashattn_ext.activate_sdpa()
    assert attention.current_flash_attention_impl() == adapter.NAME
    attention.restore_flash_attention_impl()
    assert dispatch_tables() == before
    attention.activate_flash_attention_impl(adapter.NAME)
    assert dispatch_tables() != before
    flashattn_ext.restore_sdpa()
    assert dispatch_tables() == before
    assert attention.current_flash_attention_impl() is None


@needs_registry
def test_another_implementation_comes_back():
    class Handle:
        def remove(self):
            events.append("removed")

    def start():
        events.append("started")
        return Handle()

    events = []
    attention.register_flash_attention_impl("another", register_fn=start)
    attention.activate_flash_attention_impl("another")
    try:
        with flashattn_ext.activate_sdpa():
            assert events == ["started", "removed"]
        assert events == ["started", "removed", "started"]
        assert attention.current_flash_attention_impl() == "another"
    finally:
        attention.restore_flash_attention_impl()


def test_a_missing_library_is_said_at_once(monkeypatch):
    monkeypatch.setattr(adapter._ops, "load_error", "not built")
    before = dispatch_tables()
    with pytest.raises(RuntimeError, match="not built"):
        flashattn_ext.activate_sdpa()
    assert dispatch_tables() == before


def test_import_loads_no_adapter_and_warns_of_nothing():
    program = (
        "import sys, flashattn_ext\n"
        "assert not any(name.startswith('flashattn_ext.integrations') for name in sys.modules)\n"
        "flashattn_ext.activate_sdpa()"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], check=True)


@pytest.mark.parametrize("devices", ["cpu", ("xpu",), ("cpu", "cuda:0")], ids=str)
def test_other_devices_are_refused(devices):
    with pytest.raises(ValueError, match='^devices: expected some of "cpu" and "cuda"'):
        flashattn_ext.activate_sdpa(devices)


@pytest.mark.parametrize(
    ("archs", "cuda", "keys"),
    [([80], "13.0", ["CPU", "CUDA"]), ([], "13.0", ["CPU"]), ([80], None, ["CPU"])],
)
def test_devices_are_those_of_the_build_and_of_torch(archs, cuda, keys, monkeypatch):
    monkeypatch.setattr(adapter, "BUILD", {"cuda_archs": archs})
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert adapter._dispatch_keys(None) == keys
    assert adapter._dispatch_keys(("cpu",)) == ["CPU"]
    if "CUDA" not in keys:
        with pytest.raises(RuntimeError, match='^devices: "cuda" needs'):
            flashattn_ext.activate_sdpa(("cuda",))


@pytest.mark.parametrize("devices", [(), ("cpu",), None], ids=str)
def test_only_the_devices_asked_for_change(devices):
    """Devices by their rows in the tables."""

    def rows(key):
        table = "".join(dispatch_tables()).splitlines()
        return [row for row in table if row.startswith(f"{key}:")]

    before = {key: rows(key) for key in ("CPU", "CUDA")}
    with flashattn_ext.activate_sdpa(devices):
        changed = [key for key in before if rows(key) != before[key]]
    assert changed == adapter._dispatch_keys(devices)
