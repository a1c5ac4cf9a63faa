"""What runs where the C kernels cannot be compiled."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile

import pytest
from inflight_kernels import _cpu

import inflight

SCRIPT = """
import logging, torch
logging.basicConfig(level=logging.WARNING)
from inflight_kernels import Norm, _cpu, gated_activation, linear, rms_norm
from inflight_kernels.attention import empty_cache_for_cpu, paged_attention
torch.manual_seed(0)
keys, values = empty_cache_for_cpu(3, 2, 32, 32, torch.float32)
keys.normal_()
values.normal_()
query, x, weight = torch.randn(2, 4, 32), torch.randn(5, 64), torch.randn(64)
table, starts, contexts = (torch.tensor(ids, dtype=torch.int32) for ids in ([[1, 2]], [0, 2], [20]))
results = [
    paged_attention(query, keys, values, table, starts, contexts, scale=0.2),
    linear(x, torch.randn(8, 64)),
    rms_norm(x, Norm(weight, 1e-6)),
    gated_activation(x, "silu"),
]
print(_cpu.library() is not None, [round(float(r.sum()), 3) for r in results])
"""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        pytest.param({"INFLIGHT_NO_C": "1"}, "", marks=pytest.mark.long),
        ({"CC": "/bin/false"}, "no C kernels"),
        pytest.param({"CC": "/no/such/gcc"}, "no C kernels", marks=pytest.mark.long),
    ],
)
def test_without_a_compiler_pytorch_computes_the_same(tmp_path, environment, message):
    base = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT], env=base | more, capture_output=True, text=True, check=True)
        for more in ({}, environment)
    ]
    assert runs[0].stdout.startswith("True")
    assert runs[1].stdout == runs[0].stdout.replace("True", "False", 1)
    assert message in runs[1].stderr


PROBLEM = """
import logging
logging.basicConfig(level=logging.WARNING)
from inflight_kernels import _cpu
from inflight.tools.doctor import _kernels
print(_cpu.library() is not None, *_kernels(), sep="|")
"""


def found(**variables: str) -> tuple[str, str, str]:
    """Return whether there are kernels, and the verdict and the advice of `inflight doctor`."""
    done = subprocess.run(
        [sys.executable, "-c", PROBLEM], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    has, verdict, _, advice = done.stdout.strip().split("|")
    return has, verdict, advice


@pytest.mark.medium
def test_a_home_that_cannot_be_written_to_is_named_with_the_variable_and_replaced(tmp_path):
    (tmp_path / "home").write_text("")  # a file: not even root writes below it
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    home, kept = tmp_path / "home" / "inflight", temporary / f"inflight-kernels-{os.getuid()}"
    has, verdict, advice = found(XDG_CACHE_HOME=str(tmp_path / "home"), TMPDIR=str(temporary))
    assert (has, verdict) == ("True", "note")
    assert advice == (
        f"compiled; {home} cannot be used: Not a directory; set XDG_CACHE_HOME to another directory. {kept} is used "
        "until then"
    )
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    kept.chmod(0o777)  # now it can be anybody's
    has, verdict, advice = found(XDG_CACHE_HOME=str(tmp_path / "home"), TMPDIR=str(temporary))
    assert (has, verdict) == ("False", "note")
    assert f"{home} cannot be used: Not a directory and {kept} cannot be used: others than this user" in advice
    assert "set XDG_CACHE_HOME to a directory that can be written to" in advice
    assert "gcc" not in advice


@pytest.mark.medium
def test_a_compiler_that_does_not_work_is_named_with_its_variable(tmp_path):
    has, verdict, advice = found(XDG_CACHE_HOME=str(tmp_path), CC="/no/such/gcc")
    assert (has, verdict) == ("False", "note")
    assert "/no/such/gcc cannot be run: No such file or directory; set CC to a C compiler" in advice
    assert "XDG_CACHE_HOME" not in advice


@pytest.fixture
def fake_compiler(tmp_path):
    """A command with the argument "-pipe". It makes an object that refers to a missing symbol."""
    path = tmp_path / "cc"
    path.write_text(
        "#!/bin/sh\n[ $1 = -pipe ] || exit 3\n"
        'case $2 in -shared) echo "extern int missing; int *g = &missing;" | gcc -xc - -shared -fPIC -o $6;; esac\n'
    )
    path.chmod(0o755)
    return f"{path} -pipe"


def test_an_object_that_cannot_be_loaded_is_named_and_removed(tmp_path, monkeypatch, fake_compiler):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", fake_compiler)
    with pytest.raises(_cpu._NotCompiledError, match=r"cannot be loaded: .*missing; set CC to gcc"):
        _cpu._compiled()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(
    ("compiler", "message"),
    [('gcc "', "CC cannot be read: No closing quotation"), ("/bin/false -O3", "/bin/false failed")],
)
def test_a_command_that_is_wrong_is_named(tmp_path, monkeypatch, compiler, message):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(_cpu._NotCompiledError, match=message):
        _cpu._compiled()


def test_a_blank_command_stands_for_the_usual_compiler(monkeypatch):
    monkeypatch.setenv("CC", " ")
    assert _cpu._compiler() == [shutil.which("gcc")]


def test_without_a_directory_the_reasons_are_named(monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setattr(tempfile, "gettempdir", none)
    message = "cache/inflight cannot be used: it is not an absolute path and No usable temporary directory found"
    with pytest.raises(_cpu._NotCompiledError, match=message):
        _cpu._compiled()


@pytest.mark.medium
def test_launch_says_why_the_engine_has_no_kernels(model_dir, monkeypatch, caplog):
    monkeypatch.setenv("INFLIGHT_ENGINE_INFLIGHT_NO_C", "1")
    with inflight.launch(model_dir("qwen3"), device="cpu", max_sequences=2, max_context=64):
        pass
    assert "the engine runs without the C kernels, more slowly: INFLIGHT_NO_C=1" in caplog.text
