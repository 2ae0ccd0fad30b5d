"""tests/cpp/kernel_table.py: what counts as worse."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

CPP = Path(__file__).parents[1] / "cpp"
TILE_TABLE = Path(__file__).parents[2] / "csrc" / "core" / "tile_table.h"  # numbers the roles
ROW = {
    "compiler": "13.0", "arch": 90, "kernel": "attend<128>", "registers": 200, "frame": 0,
    "instructions": 4000, "HMMA": 256, "LDGSTS": 40, "LDSM": 80,
}  # fmt: skip


@pytest.fixture(scope="module")
def table():
    sys.path.insert(0, str(CPP))
    try:
        spec = importlib.util.spec_from_file_location("kernel_table", CPP / "kernel_table.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(CPP))


def known(table):
    return {table.key(ROW): {name: str(value) for name, value in ROW.items()}}


@pytest.mark.parametrize(
    "change",
    [
        {"registers": 209}, {"frame": 24}, {"instructions": 4300}, {"HMMA": 257}, {"HMMA": 128},
        {"LDGSTS": 60}, {"LDSM": 96},
    ],
    ids=str,
)  # fmt: skip
def test_worse(table, change, capsys):
    assert table.compare([ROW | change], known(table)) == 1
    name, value = next(iter(change.items()))
    assert f"{name} {ROW[name]} -> {value}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [{}, {"registers": 208}, {"frame": 16}, {"instructions": 4100}, {"instructions": 3000}],
    ids=str,
)
def test_as_good(table, change):
    assert table.compare([ROW | change], known(table)) == 0


def test_other_compiler_is_skipped(table, capsys):
    assert table.compare([ROW | {"compiler": "12.9"}], known(table)) == 77
    assert "skipped" in capsys.readouterr().out


def test_counts_of_a_listing(table):
    sass = """
	arch = sm_90
		Function : kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;    /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R2], desc[UR6][R4.64] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R6, R4 ;
        /*0030*/              @UP1 LDSM.16.M88.4 R8, [R2] ;
        /*0040*/                   NOP ;
"""
    expected = {"instructions": 4, "HMMA": 1, "LDGSTS": 1, "LDSM": 1}
    assert table.counts(sass) == {(90, "kernel"): expected}


def test_the_table_holds_kernels_of_every_role(table):
    enum = re.search(r"^enum class Role \{(.*)\};$", TILE_TABLE.read_text(), re.MULTILINE).group(1)
    roles = [f"Role){n}>" for n in range(len(enum.split(",")))]
    assert len(roles) >= 5
    names = {row["kernel"] for row in table.known().values()}
    for part in ("flash_fwd_kernel", *roles, "combine_cuts"):
        assert any(part in name for name in names), part
