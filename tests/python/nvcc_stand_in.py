"""A program that answers what the build asks of nvcc."""


def write_nvcc(folder, version="13.0", fails=False):
    """A stand-in that answers what the build asks of nvcc."""
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f'  --version) echo "Cuda compilation tools, release {version}, V{version}.88";;\n'
        "  --list-gpu-arch) printf 'compute_75\\ncompute_80\\ncompute_90\\n';;\n"
        f"  *) {'echo unsupported GNU version! >&2; exit 1' if fails else 'exit 0'};;\n"
        "esac\n"
    )
    nvcc.chmod(0o755)
    return nvcc
