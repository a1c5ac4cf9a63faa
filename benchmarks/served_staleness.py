"""What updates cost behind HTTP: servers of inflight and of vLLM, driven by `inflight bench staleness --target`.

    python benchmarks/served_staleness.py [FILE] [--steps N] [--model SHAPE] [--only NAME …]

Every server serves the same weights to the same clients, one after another, with one thread for forward passes, and is
updated at the same rate from a checkpoint directory: ours with two slots, with one, with a pause around each update,
and with vLLM behind it; vLLM's own with each of its pauses. vLLM is that of `make peers`; without it ours are measured.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from vllm_server import PYTHON, vllm_server, vllm_version

import inflight
from inflight.tools.bench.options import StalenessOptions
from inflight.tools.bench.served_staleness import measure
from inflight.tools.bench.truth_teller import TruthTeller
from inflight.tools.environment import write_result
from inflight.tools.progress import parts_of, shown_on

SEQUENCES, TOKENS, PROMPT, INTERVAL_MS = 16, 96, 32, 1000.0


@contextmanager
def ours(model: str, *, honor_pause: bool = False, **options: Any) -> Iterator[str]:
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_sequences": SEQUENCES}
    with (
        inflight.launch(model, max_context=TOKENS + PROMPT, **(common | options)) as engine,
        engine.serve(port=0, honor_pause=honor_pause, stream_interval_ms=0) as server,
    ):
        yield server.url


@contextmanager
def vllms(model: str) -> Iterator[str]:
    with vllm_server(model, "--max-num-seqs", str(SEQUENCES), "--max-model-len", "256", threads=1) as url:
        yield url


Server = Callable[[str], AbstractContextManager[str]]
SERVERS: dict[str, tuple[Server, dict[str, Any]]] = {
    "inflight, two slots": (ours, {}),
    "inflight, one slot": (partial(ours, slots=1), {}),
    "inflight, paused around updates": (partial(ours, honor_pause=True), {"pause": "keep"}),
    "inflight, vLLM behind it": (partial(ours, backend="vllm", backend_python=PYTHON), {}),
    "vLLM, pause keep": (vllms, {"api": "vllm", "pause": "keep"}),
    "vLLM, pause wait": (vllms, {"api": "vllm", "pause": "wait"}),
    "vLLM, pause abort": (vllms, {"api": "vllm", "pause": "abort"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=Path("benchmarks/results/cpu/served-staleness.json"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default="small")
    parser.add_argument("--only", nargs="*", choices=[*SERVERS], default=[*SERVERS])
    options = parser.parse_args()
    has_vllm = Path(PYTHON).exists()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as at_end:
        weights = Path(directory) / "truth-teller"
        truth = TruthTeller(options.model)
        names = [name for name in options.only if has_vllm or "vLLM" not in name]
        parts = parts_of(at_end.enter_context(shown_on(Console())), len(names))
        for name, progress in zip(names, parts, strict=True):
            truth.save(weights)
            serve, how = SERVERS[name]
            with serve(str(weights)) as url:
                settings = StalenessOptions(
                    model=options.model, dtype="float32", sequences=SEQUENCES, tokens=TOKENS, prompt_tokens=PROMPT,
                    steps=options.steps, target=url, weights=str(weights), interval_ms=INTERVAL_MS, **how,
                )  # fmt: skip
                results[name] = measure(settings, progress)
            shown = ("stall_ms", "swap_ms", "update_ms", "gap_across_ms")
            print(name, {key: results[name][key] for key in shown}, flush=True)
    version = vllm_version() if has_vllm else None
    write_result(options.file, {"bench": "served_staleness", "servers": results, "vllm": version})


if __name__ == "__main__":
    main()
