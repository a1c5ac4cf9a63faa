"""Draws a moment of a real run: what engine and trainer did, and which version drew which token.

    python benchmarks/timeline.py [redraw]  # docs/timeline.png and benchmarks/results/cpu/timeline.json

A loop in plain PyTorch trains a model of shape "tiny" on arbitrary rewards, on a core beside the generator's, and is
traced once it has warmed up. `redraw` draws the file that is there.
"""

import json
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps

import inflight
from inflight.observability.trace_file import read
from inflight.tools.bench.options import TraceOptions
from inflight.tools.bench.staleness import engine_and_trainer, parity_of_tokens
from inflight.tools.environment import write_result
from inflight.tools.plots import new_figure, save_figure

RESULT = Path("benchmarks/results/cpu/timeline.json")
FIGURE = Path("docs/timeline.png")
GROUPS, SAMPLES, WARMUP_STEPS, SHOWN_MS = 3, 4, 10, 1500
"""Groups of a step, rollouts of a group, steps before the trace begins, and how long the trace is."""
LENGTHS = (32, 160)
"""Tokens of a rollout, at least and at most."""
SHOWN_ROLLOUTS = 20
LEAST_MS = 4
"""Copies, which take a fraction of that, are drawn so wide that they are seen."""
TRAINING = {"forward": 0, "backward": 1, "optimizer step": 2}
SHADES = ("#4c78a8", "#9ecae9", "#1b3a5b")


def main() -> None:
    if sys.argv[1:] != ["redraw"]:
        write_result(RESULT, measure())
    draw(json.loads(RESULT.read_text()))


def measure() -> dict[str, Any]:
    settings = TraceOptions(model="tiny", device="cpu", dtype="float32", sequences=GROUPS * SAMPLES, tokens=LENGTHS[1])
    random = Random(0)
    rollouts: list[inflight.Rollout] = []
    with tempfile.TemporaryDirectory() as directory, engine_and_trainer(settings) as (engine, model):
        path, trace, steps_left = Path(directory) / "trace.json", None, 4
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def submit(groups: int) -> None:
            for _ in range(groups):
                prompt = torch.randint(engine.info.vocab_size, (settings.prompt_tokens,)).tolist()
                params = inflight.SamplingParams(n=SAMPLES, max_tokens=random.randint(*LENGTHS), ignore_eos=True)
                engine.submit([prompt], params)

        with engine.publisher(model) as publisher:
            engine.wait_for_version(publisher.publish())
            submit(2 * GROUPS)
            for step, batch in enumerate(engine.stream.batches(rollouts=GROUPS * SAMPLES, score=parity_of_tokens)):
                submit(GROUPS)
                with inflight.span("forward"):
                    loss, _ = inflight.policy_loss(model, batch)
                with inflight.span("backward"):
                    loss.backward()
                with inflight.span("optimizer step"):
                    inflight.clip_and_step(optimizer)
                publisher.publish()
                rollouts += batch.rollouts
                if step == WARMUP_STEPS:
                    trace = engine.trace(path, seconds=SHOWN_MS / 1e3)
                if trace is not None and trace.done:
                    steps_left -= 1  # whose rollouts have tokens of the traced time, too
                    if steps_left == 0:
                        trace.close()
                        break
            engine.cancel()
        return described(read(path), rollouts)


def described(trace: dict[str, Any], rollouts: list[inflight.Rollout]) -> dict[str, Any]:
    """Times in ms since the trace began: passes [begin, end, version], copies and training [begin, end], tokens
    [times, versions] of some of the rollouts that have any in the traced time."""
    began_ns, end_ms = trace["otherData"]["began_monotonic_ns"], trace["otherData"]["seconds"] * 1e3
    spans = [event for event in trace["traceEvents"] if event.get("cat") == "inflight"]

    def intervals(*names: str) -> list[list[float]]:
        found = [e for e in spans if e["name"].startswith(names)]
        return [[round(e["ts"] / 1e3, 3), round((e["ts"] + e["dur"]) / 1e3, 3)] for e in found]

    passes = [e for e in spans if e["name"] in ("prefill", "decode")]
    tokens = []
    for rollout in rollouts:
        times = (rollout.sampled_at_ns - began_ns) / 1e6
        inside = (times > 0) & (times < end_ms)
        if inside.sum() > 1:
            tokens.append([times[inside].round(2).tolist(), rollout.weight_versions[inside].tolist()])
    tokens.sort(key=lambda rollout: rollout[0][0])
    return {
        "bench": "timeline",
        "model": "tiny",
        "milliseconds": end_ms,
        "num_versions": len({version for _, versions in tokens for version in versions}),
        "share_of_rollouts_with_several_versions": float(np.mean([len(set(r.weight_versions)) > 1 for r in rollouts])),
        "passes": [[*i, e["args"]["version"]] for i, e in zip(intervals("prefill", "decode"), passes, strict=True)],
        "copies": intervals("publish copy"),
        "training": {name: intervals(name) for name in TRAINING},
        "rollouts": tokens[:: max(1, len(tokens) // SHOWN_ROLLOUTS)][:SHOWN_ROLLOUTS],
    }


def draw(result: dict[str, Any]) -> None:
    figure, [axes] = new_figure("a run on two CPU cores, one for the engine and one for the trainer")
    figure.set_size_inches(10, 5.6)
    axes.grid(visible=False)
    versions = sorted({version for *_, version in result["passes"]})
    colour = {version: colormaps["tab10"](i % 10) for i, version in enumerate(versions)}
    for begin, end, version in result["passes"]:
        axes.broken_barh([(begin, end - begin)], (-0.4, 0.8), color=colour[version], linewidth=0)
    for name, shade in TRAINING.items():
        bars = [(begin, end - begin) for begin, end in result["training"][name]]
        axes.broken_barh(bars, (-2.4, 0.8), color=SHADES[shade], linewidth=0, label=name)
    copies = [(begin, max(end - begin, LEAST_MS)) for begin, end in result["copies"]]
    axes.broken_barh(copies, (-1.4, 0.8), color="black", linewidth=0)
    for row, (times, drawn_by) in enumerate(result["rollouts"]):
        y = 1 + 0.35 * row
        axes.plot([times[0], times[-1]], [y, y], color="0.8", linewidth=0.6, zorder=1)
        axes.scatter(times, [y] * len(times), s=4, color=[colour[version] for version in drawn_by], linewidths=0)
    middle = 1 + 0.35 * (len(result["rollouts"]) - 1) / 2
    labels = ["trainer: forward,\nbackward, step", "trainer's thread:\npublish copy", "engine:\nforward passes"]
    axes.set_yticks([-2, -1, 0, middle], [*labels, "rollouts:\na dot is\na token"])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, result["milliseconds"])
    axes.set_xlabel("milliseconds; colours are versions of the weights")
    save_figure(FIGURE, figure)


if __name__ == "__main__":
    main()
