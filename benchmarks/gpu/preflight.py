"""Before everything else on a GPU: does an engine here run with FlashInfer and CUDA graphs, and does it take weights?

    python benchmarks/gpu/preflight.py [--device cuda]

It launches the smallest built-in model, publishes weights to it once (by CUDA IPC), draws a few tokens and prints how
the engine runs. Exits with 1 and the reason in the last line if it runs otherwise: nothing that is measured then would
be of what was built.
"""

import argparse
import sys
from typing import Any

import torch

import inflight
from inflight.engine.model.loading import load_model
from inflight.engine.model.shapes import SHAPES
from inflight.engine.process.directory import LOG_NAME

MODEL = "tiny"


def why_not(device: str) -> str | None:
    """What keeps an engine on this device from running as it should, or None. On a CPU it has to run at all."""
    on_gpu = torch.device(device).type == "cuda"
    try:
        with inflight.launch(
            MODEL,
            device=device,
            dtype="bfloat16",
            attention="flashinfer" if on_gpu else "auto",
            max_sequences=4,
            max_context=64,
            timeout_s=80,
        ) as engine:
            print(engine.info.execution())
            if on_gpu and not engine.info.num_graphs:
                process: Any = engine.members[0].process
                print((process.directory / LOG_NAME).read_text())
                return "no CUDA graph was recorded; the engine's log above says why"
            model = load_model(MODEL, dtype=torch.float32, device=torch.device(device), seed=1)
            with engine.publisher(model) as publisher:
                engine.wait_for_version(publisher.publish())
            params = inflight.SamplingParams(max_tokens=8, ignore_eos=True, return_entropy=True)
            [[rollout]] = engine.generate([[1, 2, 3]], params)
            if set(rollout.weight_versions) != {1} or not 0 <= min(rollout.token_ids) < SHAPES[MODEL].vocabulary:
                return f"drew {rollout.token_ids} with versions {rollout.weight_versions}"
    except inflight.InflightError as error:
        return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    reason = why_not(parser.parse_args().device)
    if reason is not None:
        print(f"preflight: {' '.join(reason.split())}")
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
