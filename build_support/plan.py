"""From environment variables to a build plan: what is compiled, with what, how many at a time."""

from dataclasses import dataclass, field

from . import BuildError, architectures, jobs, packages, toolchain, tools

HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)


@dataclass
class Plan:
    head_dims: tuple
    nvcc: tools.Nvcc = None
    cuda_off_reason: str = ""
    archs: tuple = ()
    ptx_arch: int = 0
    jobs: int = 1
    report: list = field(default_factory=list)  # lines for the user

    def cmake_arguments(self):
        if self.nvcc is None:
            return ["-DFLASHATTN_CUDA=OFF", f"-DFLASHATTN_CUDA_OFF_REASON={self.cuda_off_reason}"]
        return [
            "-DFLASHATTN_CUDA=ON",
            "-DFLASHATTN_CUDA_OFF_REASON=",
            f"-DCMAKE_CUDA_COMPILER={self.nvcc.path}",
            f"-DFLASHATTN_ARCHS={_joined(self.archs, ';')}",
            f"-DFLASHATTN_PTX_ARCH={self.ptx_arch}",
            f"-DFLASHATTN_HEAD_DIMS={_joined(self.head_dims, ';')}",
        ]


def make_plan(environ):
    plan = Plan(head_dims=parse_head_dims(environ.get("FLASHATTN_EXT_HEAD_DIMS", "")))
    plan.nvcc, plan.cuda_off_reason = find_cuda(environ)
    if plan.nvcc is None:
        plan.report.append(f"CPU only: {plan.cuda_off_reason}")
        gib_per_file = jobs.GIB_PER_CPP_FILE
    else:
        _plan_kernels(plan, environ)
        gib_per_file = jobs.GIB_PER_CUDA_FILE
    cores, free = jobs.usable_cores(), jobs.free_gib()
    plan.jobs = jobs.choose_jobs(environ, cores, free, gib_per_file)
    why = "MAX_JOBS" if environ.get("MAX_JOBS") else "set MAX_JOBS to change it"
    plan.report.append(
        f"{plan.jobs} at a time "
        f"({cores} cores, {free:.0f} GiB free, {gib_per_file} GiB per file; {why})"
    )
    return plan


def _plan_kernels(plan, environ):
    plan.archs, plan.ptx_arch, source = architectures.choose(
        environ.get("TORCH_CUDA_ARCH_LIST", ""), architectures.visible_gpus(), plan.nvcc.compilable
    )
    files = 4 * len(plan.head_dims) * len(plan.archs)  # two types; large tiles and small ones
    plan.report += [
        f"CUDA kernels for {architectures.dotted(plan.archs)} from {source} "
        f"(PTX of {architectures.dotted([plan.ptx_arch])} for newer GPUs)",
        f"head dims {_joined(plan.head_dims, ', ')}; fp16 and bf16: {files} CUDA files",
        f"nvcc {plan.nvcc.version} at {plan.nvcc.path}",
    ]
    torch = packages.find_all()
    major = torch.get("TORCH_CUDA", "").split(".")[0]
    if major and major != plan.nvcc.version.split(".")[0]:
        plan.report.append(
            f"note: torch {torch['TORCH_VERSION']} in {torch['TORCH_DIR']} was built for CUDA "
            f"{torch['TORCH_CUDA']}. That is fine as long as the driver supports both; for the "
            "same version set CUDA_HOME to that toolkit."
        )


def parse_head_dims(text):
    """FLASHATTN_EXT_HEAD_DIMS -> ascending head dims; all of them when it is empty."""
    words = text.replace(",", " ").replace(";", " ").split()
    unknown = [word for word in words if not word.isdecimal() or int(word) not in HEAD_DIMS]
    if unknown:
        raise BuildError(
            f"FLASHATTN_EXT_HEAD_DIMS: no kernel for {', '.join(unknown)}. Expected some of "
            f"{_joined(HEAD_DIMS, ', ')}; other head dims run on the next larger one."
        )
    return tuple(sorted({int(word) for word in words})) or HEAD_DIMS


def cuda_mode(environ):
    mode = environ.get("FLASHATTN_EXT_CUDA", "").lower() or "auto"
    if mode not in ("auto", "on", "packages", "off"):
        raise BuildError(f"FLASHATTN_EXT_CUDA: expected auto, on, packages or off, got {mode!r}")
    return mode


def find_cuda(environ):
    """FLASHATTN_EXT_CUDA -> (nvcc or None, why there is none)."""
    mode = cuda_mode(environ)
    if mode == "off":
        return None, "FLASHATTN_EXT_CUDA=off was set at build time"
    path = None if mode == "packages" else tools.locate_nvcc(environ)
    toolkit = toolchain.find() if path is None else None
    if toolkit is not None:
        path = toolchain.link_home(toolkit)
    if path is not None:
        return tools.inspect_nvcc(path), ""
    if mode == "packages":
        raise BuildError(
            "FLASHATTN_EXT_CUDA=packages, but no package here has nvcc: "
            f"pip install '{toolchain.requirement()}'"
        )
    looked = "nvcc was not found in CUDA_HOME, CUDACXX, PATH, /usr/local/cuda or a package"
    if mode == "on":
        raise BuildError(
            f"FLASHATTN_EXT_CUDA=on, but {looked}. Install the CUDA toolkit (in containers: a "
            "-devel image) and set CUDA_HOME to it, let FLASHATTN_EXT_CUDA=packages fetch nvcc, or "
            "set FLASHATTN_EXT_CUDA=off for a CPU-only build."
        )
    return None, looked


def _joined(numbers, separator):
    return separator.join(map(str, numbers))
