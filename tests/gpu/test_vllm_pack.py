"""What `make gpu-bundle VLLM=1` keeps of vLLM. Nothing is downloaded here."""

import re
import struct
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
import vllm_pack

MACHINE_CODE, PTX = 2, 1


def entry(arch: int, code: bytes, kind: int = MACHINE_CODE) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + struct.pack("<IIHHI", 0, 0, 8, 1, arch)
    return head.ljust(64, b"\0") + code


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def codes(library: bytes) -> list[list[bytes]]:
    return [[found.data[64:] for found in fat.entries] for fat in vllm_pack.fatbins(library)]


FILLER = entry(75, b"f")
MIXED = fatbin(entry(80, b"old" * 50), entry(90, b"hopper"), entry(90, b"PTX", PTX), entry(90, b"hopper a"))
LIBRARY = b"before" + MIXED + b"between" + fatbin(entry(120, b"new" * 90)) + b"after"


def test_a_library_keeps_the_machine_code_of_one_architecture_and_all_other_bytes():
    slim = vllm_pack.keep_one_arch(LIBRARY, FILLER, None)
    assert codes(slim) == [[b"hopper", b"hopper a"], [b"f"]]
    assert len(slim) == len(LIBRARY)
    middle = len(b"before" + MIXED)
    assert slim.startswith(b"before\x50\xed\x55\xba")
    assert slim[middle:].startswith(b"between\x50\xed\x55\xba")
    assert slim.endswith(b"after")
    for gone in (b"old", b"PTX", b"new"):
        assert gone not in slim


def test_kernels_of_these_names_are_dropped_too():
    library = fatbin(entry(90, b"attend_half"), entry(90, b"attend_bfloat16")) + fatbin(entry(90, b"half only"))
    assert codes(vllm_pack.keep_one_arch(library, FILLER, re.compile(b"half"))) == [[b"attend_bfloat16"], [b"f"]]


def test_a_fatbin_smaller_than_the_filler_stays():
    small = b"x" + fatbin(entry(80, b"a")) + b"y"
    assert vllm_pack.keep_one_arch(small, entry(75, b"longer"), None) == small


def test_bytes_that_only_look_like_a_fatbin_stay():
    lookalike = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 2**40)
    assert codes(lookalike + fatbin(entry(90, b"code"))) == [[b"code"]]


@pytest.mark.parametrize(
    ("num_bytes", "reason"), [(66, "its entries end at byte 84"), (70, "no entry starts at byte 84")]
)
def test_a_fatbin_of_another_format_is_refused(num_bytes, reason):
    broken = bytearray(fatbin(entry(90, b"code")) + bytes(99))
    struct.pack_into("<Q", broken, 8, num_bytes)
    with pytest.raises(ValueError, match=f"the fatbin at byte 0 is not of a known format: {reason}"):
        list(vllm_pack.fatbins(bytes(broken)))


def test_the_filler_is_the_smallest_program_of_another_architecture():
    assert vllm_pack.smallest_entry([LIBRARY, fatbin(entry(90, b""), entry(80, b"", PTX), FILLER)]) == FILLER


def test_a_pack_keeps_what_is_read_and_unpacks(tmp_path, monkeypatch):
    site, host = tmp_path / "site", tmp_path / "host"
    read = ["vllm/llm.py", "vllm/v1/tests/helper.py", "openai/types.py"]
    for name in [*read, "dill/tests/test_dill.py", "vllm/vllm-rs", "openai/types.pyi", *vllm_pack.LIBRARIES]:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(LIBRARY + fatbin(FILLER) if name in vllm_pack.LIBRARIES else b"text")
    vllm_pack.prune(site)
    vllm_pack.pack(site, tmp_path / "out" / vllm_pack.ARCHIVE)
    monkeypatch.setattr(sys, "argv", ["vllm_pack.py", str(tmp_path / "out"), "--unpack", str(host)])
    vllm_pack.main()
    names = sorted(path.relative_to(host).as_posix() for path in host.rglob("*") if path.is_file())
    assert names == sorted([*read, *vllm_pack.LIBRARIES])
    assert all(b"hopper a" in (host / name).read_bytes() for name in vllm_pack.LIBRARIES)
    assert all(b"old" not in (host / name).read_bytes() for name in vllm_pack.LIBRARIES)
