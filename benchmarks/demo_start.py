"""Makes the checkpoint that `inflight demo` starts from, inflight/tools/demo/start.safetensors. It takes
about a minute on 2 cores.

python benchmarks/demo_start.py [--out FILE] [--steps N]
"""

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from inflight.core.files import replacing
from inflight.fleet.launching import launch
from inflight.tools.demo.recipes import SMALL
from inflight.tools.demo.run import held_out_accuracy, longest
from inflight.tools.demo.start import MODEL, RECIPE, START_FILE, TASK
from inflight.tools.demo.tasks import gym_task
from inflight.tools.demo.trainer import load_trainer, require_tokenizer, saved, warm_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=START_FILE, help="the file to write")
    parser.add_argument("--steps", type=int, default=RECIPE.steps, help="supervised steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(RECIPE.seed)
    task = gym_task(TASK, seed=RECIPE.seed)
    model, tokenizer = load_trainer(MODEL, torch.device("cpu")), require_tokenizer(MODEL)

    recipe = replace(RECIPE, steps=options.steps)
    for _ in warm_up(model, tokenizer, task.train, recipe):
        pass
    with (
        tempfile.TemporaryDirectory() as directory,
        saved(model, tokenizer, Path(directory)) as start,
        launch(
            start,
            device="cpu",
            threads=1,
            max_sequences=SMALL.max_sequences,
            max_context=longest(task, tokenizer),
        ) as engine,
    ):
        accuracy = held_out_accuracy(engine, task, task.held_out)
    metadata = {"recipe": json.dumps(asdict(recipe)), "accuracy": str(accuracy), "torch": torch.__version__}
    with replacing(options.out) as partial:
        save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, partial, metadata)
    print(f"{options.out}: held-out accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
