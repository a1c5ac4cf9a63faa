"""The table of docs/families.md: `python tests/helpers/family_table.py > docs/families.md`. With names of families or
of model types, those alone. Ends with status 1 if a family is neither right nor refused by name."""

import argparse
import logging
import sys
from collections import Counter

import torch
import transformers
from family_check import GOOD, NOT_BUILT, Result, check_family
from family_configs import Family, all_families, causal_families
from transformers.utils.logging import disable_progress_bar

INTRODUCTION = """\
# Model families

After reading this page you know what becomes of your model. It lists every model that Transformers {version} can make
predict tokens: the engine computes what Transformers computes, or refuses the model at load and says why; so does the
trainer's loss. There is no third outcome. [structure.md](structure.md#how-a-model-is-judged) tells how a model is
judged, and [engine.md](engine.md#which-models-run) which ones run fused.

Each row is a tiny model with random weights, large enough that every part of it shows, whose windows, chunks and
scaling thresholds are shorter than the sequences. Log-probabilities that the engine recorded (ragged prompts, in
chunks, some joining late, greedy and not) and those of the trainer (samples of one prompt packed together, with
gradient) are held against Transformers' full forward pass over each sequence alone: to 1e-3 nats in fp32, in bf16 to
1.2 × what Transformers' own bf16 is off by. "Fused" runs with fused kernels, "unfused" as Transformers runs it. Made by
`python tests/helpers/family_table.py > docs/families.md`.

{counts}
"""
HEAD = "| family | engine | why | trainer |\n|---|---|---|---|"


def _row(result: Result) -> str:
    why = result.engine.reason
    trainer = result.trainer.kind + (f": {result.trainer.reason}" if result.trainer.reason else "")
    return " | ".join(["", result.family, result.engine.kind, _cell(why), _cell(trainer), ""]).strip()


def _cell(text: str, longest: int = 200) -> str:
    text = text.replace("|", "\\|")
    return text if len(text) <= longest else text[: text.rindex(" ", 0, longest)] + " …"


def _counts(results: list[Result]) -> str:
    return "; ".join(
        f"{side}: " + ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).most_common())
        for side, kinds in (
            ("engine", [result.engine.kind for result in results]),
            ("trainer", [result.trainer.kind for result in results]),
        )
    )


def _table(results: list[Result]) -> str:
    rows = sorted(results, key=lambda result: result.family)
    return "\n".join([HEAD, *(_row(result) for result in rows)])


def _is_named(family: Family, names: list[str]) -> bool:
    return not names or family.name in names or family.model_type in names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    names = parser.parse_args().families
    disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results = []
    for family in filter(lambda family: _is_named(family, names), all_families()):
        results.append(check_family(family))
        print(_row(results[-1]), file=sys.stderr, flush=True)
    registered = {family.name for family in all_families() if family.model_type in causal_families()}
    causal = [result for result in results if result.family in registered]
    others = [result for result in results if result.family not in registered]
    print(INTRODUCTION.format(version=transformers.__version__, counts=f"{len(causal)} rows. {_counts(causal)}."))
    print(_table(causal))
    if others:
        print("\n## Models that are not made for text alone, encoder-decoders and encoders\n")
        print(f"The engine runs none of them. {len(others)} rows. {_counts(others)}.\n")
        print(_table(others))
    outcomes = [outcome for result in results for outcome in (result.engine, result.trainer)]
    return int(any(outcome.kind not in (*GOOD, NOT_BUILT) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
