"""Stands in for the parts of vLLM that `bench throughput --peer vllm` uses. It draws uniformly, without a model."""

import math
from pathlib import Path
from types import SimpleNamespace


class SamplingParams(SimpleNamespace):
    """The arguments, by their names."""


class LLM:
    def __init__(self, **arguments):
        self.vocabulary = 512

    def generate(self, prompts, params, use_tqdm):
        return [SimpleNamespace(outputs=[self._sample(each.max_tokens)]) for each in params]

    def _sample(self, count):
        logprob = SimpleNamespace(logprob=-math.log(self.vocabulary))
        return SimpleNamespace(token_ids=[0] * count, logprobs=[{0: logprob}] * count)


def install(directory: Path) -> Path:
    """Makes a folder with this vLLM in it, for PEERS_PATH."""
    package, about = directory / "vllm", directory / "vllm-0.0.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").write_text(Path(__file__).read_text())
    (package / "platforms.py").write_text(
        "from types import SimpleNamespace\ncurrent_platform = SimpleNamespace(device_type='cpu')\n"
    )
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0\n")
    return directory
