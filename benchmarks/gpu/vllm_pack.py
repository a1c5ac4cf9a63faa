"""`make gpu-bundle VLLM=1`: vLLM for a Hopper GPU host without a network, in one file of about 30 MB.

    OUT/vllm.tar.xz     vLLM and its imports for Python 3.12, except the host's packages and `.gpu-bundle`

It runs dense models in bf16. Wheels have 700 MB, mostly code for other GPUs and number formats. This script drops that
code inside vLLM's libraries, too. It needs a package index and 2 GB of disk, and no GPU. See docs/gpu.md.

    python benchmarks/gpu/vllm_pack.py [OUT]          makes OUT/vllm.tar.xz; OUT is .gpu-vllm by default
    python benchmarks/gpu/vllm_pack.py --unpack DIR   on the host: unpacks it to DIR, for PEERS_PATH=DIR
"""

import argparse
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARCHIVE = "vllm.tar.xz"
ARCH = 90
"""The compute capability of Hopper."""

PACKAGES = [
    "vllm==0.26.0", "annotated-types==0.8.0", "astor==0.8.1", "blake3==1.0.11", "cachetools==8.0.0", "cbor2==6.2.1",
    "compressed-tensors==0.17.0", "depyf==0.20.0", "dill==0.4.1", "docstring-parser==0.18.0", "fastapi==0.136.3",
    "httpcore2==2.16.2", "httpx2==2.16.2", "ijson==3.6.0", "interegular==0.3.3", "jiter==0.19.0", "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1", "lark==1.2.2", "llguidance==1.7.6", "lm-format-enforcer==0.11.3",
    "loguru==0.7.3", "mistral-common==1.13.1", "openai==3.52.0", "openai-harmony==0.0.8", "opentelemetry-api==1.45.2",
    "opentelemetry-sdk==1.45.2", "opentelemetry-semantic-conventions==0.66b2", "outlines-core==0.2.14",
    "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1", "pycountry==26.2.16", "pydantic==2.14.3",
    "pydantic-core==2.50.4", "pydantic-extra-types==2.11.1", "pydantic-settings==2.16.3", "python-dotenv==1.2.4",
    "python-json-logger==4.2.0", "referencing==0.37.0", "rpds-py==2026.9.1", "setproctitle==1.3.8", "sniffio==1.3.1",
    "starlette==1.10.0", "torch-c-dlpack-ext==0.1.5", "truststore==0.10.5", "typing-inspection==0.4.5",
    "uvicorn==0.54.0", "watchfiles==1.3.0", "xgrammar==0.2.7",
]  # fmt: skip
"""vLLM and its imports. `.gpu-bundle` has FlashInfer, pyzmq and msgspec; the host has PyTorch and Transformers."""
LEFT_OUT = [
    "bin/*", "*.pyi", "*/__pycache__/*", "*.dist-info/sboms/*", "[!v]*/tests/*",
    "vllm/vllm-rs", "vllm/_rust_tool_parser.abi3.so", "vllm/assets/*.jpg", "vllm/benchmarks/datasets/*",
    "vllm/entrypoints/serve/instrumentator/static/*",  # vllm serve
    "vllm/_qutlass_C.abi3.so", "vllm/_flashmla*.so", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/third_party/fmha_sm100/*", "vllm/third_party/deep_gemm/*",  # other GPUs, other attention, fp8
    "vllm/model_executor/layers/fused_moe/configs/*.json", "vllm/model_executor/layers/quantization/*.json",
    "compressed_tensors/transform/utils/hadamards.safetensors", "mistral_common/data/*", "pycountry/locales/*",
]  # fmt: skip
LIBRARIES = {
    "vllm/_C_stable_libtorch.abi3.so": None,
    "vllm/_moe_C_stable_libtorch.abi3.so": None,
    # All kernels of FlashAttention 3 are for Hopper. Kernels for fp16, fp8 and softcaps are dropped.
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": re.compile(
        rb"MainloopFwdSm90I\w*?(?:(?:half_t|float_e4m3_t)Ef|bfloat16_tEf\w*?Sm90ELb[01]ELb[01]ELb1E)"
    ),
}
"""Libraries with code for the GPU, and names of kernels that a dense model in bf16 does not run."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One program of a fatbin: machine code for one architecture, or PTX."""

    data: bytes
    arch: int
    is_machine_code: bool


@dataclass(frozen=True, slots=True)
class Fatbin:
    """One source file's code for several architectures, inside a library."""

    start: int
    """Where its entries start. The number of their bytes is in the 8 bytes before."""
    num_bytes: int
    entries: list[Entry]


def fatbins(library: bytes) -> Iterator[Fatbin]:
    """Find the fatbins of a library by their magic number, version and header size."""
    head = struct.pack("<IHH", 0xBA55ED50, 1, 16)
    at = library.find(head)
    while at >= 0:
        start, (num_bytes,) = at + 16, struct.unpack_from("<Q", library, at + 8)
        if start + num_bytes > len(library):  # these bytes are in the library for another reason
            at = library.find(head, at + 4)
            continue
        entries, where = [], start
        while where < start + num_bytes:
            kind, _, header_bytes, payload_bytes = struct.unpack_from("<HHIQ", library, where)
            (arch,) = struct.unpack_from("<I", library, where + 28)
            if header_bytes < 32:
                raise ValueError(f"the fatbin at byte {at} is not of a known format: no entry starts at byte {where}")
            end = where + header_bytes + payload_bytes
            entries.append(Entry(library[where:end], arch, kind == 2))
            where = end
        if where != start + num_bytes:
            raise ValueError(f"the fatbin at byte {at} is not of a known format: its entries end at byte {where}")
        yield Fatbin(start, num_bytes, entries)
        at = library.find(head, start + num_bytes)


def keep_one_arch(library: bytes, filler: bytes, unused: re.Pattern[bytes] | None, arch: int = ARCH) -> bytes:
    """Return the library with machine code of one architecture only. Addresses stay, and freed bytes are zeros, because
    these compress to nothing.

    filler: an entry for another architecture. It keeps a fatbin valid that has no other entry left. CUDA reports "no
    kernel image" if one of its kernels is called. unused: names of kernels to drop as well.
    """
    slim = bytearray(library)
    for fatbin in fatbins(library):
        kept = [entry.data for entry in fatbin.entries if entry.is_machine_code and entry.arch == arch]
        body = b"".join(data for data in kept if unused is None or not unused.search(data)) or filler
        if len(body) > fatbin.num_bytes:
            continue
        end = fatbin.start + fatbin.num_bytes
        struct.pack_into("<Q", slim, fatbin.start - 8, len(body))
        slim[fatbin.start : end] = body + bytes(fatbin.num_bytes - len(body))
    return bytes(slim)


def smallest_entry(libraries: list[bytes], arch: int = ARCH) -> bytes:
    """Return the smallest program for another architecture."""
    entries = [entry for library in libraries for fatbin in fatbins(library) for entry in fatbin.entries]
    return min((entry.data for entry in entries if entry.is_machine_code and entry.arch != arch), key=len)


def download(site: Path) -> None:
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
    platforms += [f"--platform=manylinux{name}_x86_64" for name in ("1", "2010", "2014")]
    target = ["--target", str(site), "--python-version=3.12", "--only-binary=:all:", *platforms]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-compile", *target, *PACKAGES], check=True)


def prune(site: Path) -> None:
    """Remove files that the host never reads, and code for other GPUs."""
    for path in site.rglob("*"):
        if path.is_file() and any(fnmatch(path.relative_to(site).as_posix(), pattern) for pattern in LEFT_OUT):
            path.unlink()
    libraries = {name: (site / name).read_bytes() for name in LIBRARIES}
    filler = smallest_entry(list(libraries.values()))
    for name, library in libraries.items():
        (site / name).write_bytes(keep_one_arch(library, filler, LIBRARIES[name]))


def pack(site: Path, archive: Path) -> None:
    """Pack a folder. Files of a kind are neighbours, because they compress better."""
    files = sorted((path for path in site.rglob("*") if path.is_file()), key=lambda path: (path.suffix, path))
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9 | lzma.PRESET_EXTREME) as tar:  # pyright: ignore[reportArgumentType]
        for path in files:
            tar.add(path, path.relative_to(site).as_posix())


def unpack(archive: Path, site: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(site, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / ".gpu-vllm")
    parser.add_argument("--unpack", type=Path, metavar="DIR", help="unpack OUT/vllm.tar.xz to this folder")
    args = parser.parse_args()
    archive = args.out / ARCHIVE
    if args.unpack:
        unpack(archive, args.unpack)
        print(f"vLLM is unpacked; on the host: PEERS_PATH={args.unpack.resolve()}")
        return
    site = ROOT / "build" / "gpu-vllm"
    shutil.rmtree(site, ignore_errors=True)
    download(site)
    prune(site)
    pack(site, archive)
    print(f"{archive.stat().st_size / 2**20:>5.1f} MiB  {archive}")


if __name__ == "__main__":
    main()
