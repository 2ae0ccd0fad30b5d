"""What the built libraries may depend on, so that they load with every torch from 2.10 on."""

import re
import subprocess

from flashattn_ext._build import LIBRARY, PACKAGE_DIR


def test_library_uses_only_the_stable_abi_of_torch():
    command = ["nm", "-DC", "--undefined-only", LIBRARY]
    undefined = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "aoti_torch_" in undefined  # otherwise this looks at the wrong thing
    assert re.findall(r" (?:at|c10|torch)::.*", undefined) == []


def dynamic_section(library):
    """The libraries that it names, and the whole text."""
    command = ["readelf", "-d", library]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic), dynamic


def test_library_needs_no_cuda_library():
    needed, dynamic = dynamic_section(LIBRARY)
    assert "libtorch.so" in needed and "libtorch_cpu.so" in needed
    assert [name for name in needed if "cuda" in name or "cudart" in name or "python" in name] == []
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic


def test_host_module_needs_neither_torch_nor_cuda():
    for module in PACKAGE_DIR.glob("_host.*.so"):
        needed = " ".join(dynamic_section(module)[0])
        assert "libc.so" in needed and "torch" not in needed and "cuda" not in needed
