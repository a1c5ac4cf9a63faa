"""Installed packages of GPU kernels do not change a twin's outputs on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_configs import Family
from family_weights import make_model
from made_batches import make_batch

from inflight.model_checks.mixers import Replaceable, functions_replaced, keeps_state
from inflight.model_checks.torch_functions import _replaceable_functions, use_torch_on_cpu
from inflight.training.model import forward
from inflight.training.model import forward_mode as ways

FAMILIES = ("qwen3_5_text", "lfm2", "kimi_linear", "falcon_h1", "mamba")
PACKAGES = {
    "fla/ops/gated_delta_rule.py": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "fla/ops/kda.py": ("chunk_kda", "fused_recurrent_kda"),
    "causal_conv1d/__init__.py": ("causal_conv1d_fn", "causal_conv1d_update"),
    "mamba_ssm/ops/selective_scan_interface.py": ("mamba_inner_fn", "selective_scan_fn"),
    "mamba_ssm/ops/triton/ssd_combined.py": ("mamba_split_conv1d_scan_combined", "mamba_chunk_scan_combined"),
    "mamba_ssm/ops/triton/selective_state_update.py": ("selective_state_update",),
}
FAKE = """
def {name}(x, *args, **kwargs):
    raise RuntimeError("0 active drivers ([]). There should only be one.")
"""


def scored(name: str) -> tuple[str, list[float]]:
    """The way in which sequences are fed to a family's model, and the log-probabilities of a batch."""
    model = make_model(Family(name, name))
    way = ways._find(model, forward.try_way)
    with torch.no_grad():
        return way, forward.score_tokens(model, make_batch()).logprobs.tolist()


@pytest.fixture(scope="module")
def scored_with_packages(tmp_path_factory):
    """The same in a process in which packages are installed whose functions raise as Triton does without a GPU."""
    directory: Path = tmp_path_factory.mktemp("packages")
    for path, names in PACKAGES.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for parent in file.relative_to(directory).parents:
            (directory / parent / "__init__.py").touch()
        file.write_text("".join(FAKE.format(name=name) for name in names))
    program = (
        "import json, sys; from test_torch_functions import scored; "
        "print(json.dumps({name: scored(name) for name in sys.argv[1:]}))"
    )
    own = Path(__file__).parent
    paths = [str(directory), str(own), str(own.parent / "helpers"), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", program, *FAMILIES],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_trained_as_it_is_without_the_packages(name, scored_with_packages):
    way, logprobs = scored_with_packages[name]
    expected_way, expected = scored(name)
    assert way == expected_way == ("rows" if name == "mamba" else "fused")
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_without_packages_nothing_is_replaced():
    model = make_model(Family("qwen3_5_text", "qwen3_5_text"))
    rule = sys.modules[type(model).__module__].torch_chunk_gated_delta_rule
    before = getattr(rule, "function", rule).__closure__  # a loss in this process can have made it replaceable
    contents = [cell.cell_contents for cell in before]
    use_torch_on_cpu(model)
    assert all(cell.cell_contents is was for cell, was in zip(before, contents, strict=True))


def test_functions_are_found_after_a_loss_has_replaced_them():
    model = make_model(Family("qwen3_5_text", "qwen3_5_text"))
    layer = next(module for module in model.modules() if keeps_state(module))
    names = vars(sys.modules[type(layer).__module__])
    before = set(_replaceable_functions(names))
    with functions_replaced(layer, {"torch_chunk_gated_delta_rule": lambda own: own}):
        pass
    assert isinstance(names["torch_chunk_gated_delta_rule"], Replaceable)
    assert names["torch_chunk_gated_delta_rule"].function in before
    assert set(_replaceable_functions(names)) == before
