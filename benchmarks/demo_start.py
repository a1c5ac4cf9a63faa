"""Makes the checkpoint that `inflight demo` starts from, inflight/tools/demo/start.safetensors. It takes
about a minute on 2 cores.

python benchmarks/demo_start.py [--out FILE] [--steps N]
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from inflight.fleet.launching import launch
from inflight.tools.demo.recipes import SMALL
from inflight.tools.demo.run import held_out_accuracy, longest
from inflight.tools.demo.start import MODEL, RECIPE, START_FILE, TASK, start_metadata, write_start
from inflight.tools.demo.tasks import gym_task
from inflight.tools.demo.trainer import load_trainer, require_tokenizer, saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=START_FILE, help="the file to write")
    parser.add_argument("--steps", type=int, default=RECIPE.steps, help="supervised steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(RECIPE.seed)
    task = gym_task(TASK, seed=RECIPE.seed)
    model, tokenizer = load_trainer(MODEL, torch.device("cpu")), require_tokenizer(MODEL)

    def evaluate() -> float:
        with (
            tempfile.TemporaryDirectory() as directory,
            saved(model, tokenizer, Path(directory) / "start") as start,
            launch(
                start,
                device="cpu",
                threads=1,
                max_sequences=SMALL.max_sequences,
                max_context=longest(task, tokenizer),
            ) as engine,
        ):
            return held_out_accuracy(engine, task, task.held_out)

    write_start(options.out, model, tokenizer, task, evaluate, replace(RECIPE, steps=options.steps))
    print(f"{options.out}: held-out accuracy {float(start_metadata(options.out)['accuracy']):.3f}")


if __name__ == "__main__":
    main()
