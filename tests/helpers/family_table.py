"""Writes the tables of docs/families.md.

    python tests/helpers/family_table.py > docs/families.md

With names of rows or of model types, only those are measured; `--keep docs/families.md` copies the other rows from
that page. Exits with status 1 if a row is neither right nor refused by name.
"""

import argparse
import logging
import re
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers
from family_check import GOOD, NOT_BUILT, Outcome, Result, check_family
from family_configs import Family, all_families, causal_families, multimodal_families
from family_published import rows_of_checkpoints
from transformers.utils.logging import disable_progress_bar

INTRODUCTION = """\
# Model families

After reading this page you know why a model is refused or runs unfused, for every model of Transformers {version} that
predicts tokens. [models.md](models.md) lists the checkpoints that people train. The engine computes what Transformers
computes, or refuses the model when it loads and gives the reason. The same holds for the trainer's loss.
[structure.md](structure.md#how-a-model-is-judged) explains how a model is judged, and
[engine.md](engine.md#which-models-run) which models run fused. Models with
[sparse attention](engine.md#sparse-attention) run up to the length at which it leaves out keys. On older
versions of Transformers, layers with a state (before 5.24) and sparse attention (before 5.18) are refused.

## Published checkpoints

Find your checkpoint here, then its row in the next table. A row has the checkpoint's kinds of layers, rotary scaling,
biases, norms, windows, tied embeddings, experts and multipliers. Multimodal checkpoints that AutoModelForCausalLM does
not load (Qwen3-VL, Mistral Small 3, Kimi K2.5) are in the table of multimodal models.

{checkpoints}

## Families

Each row is a tiny model with random weights. The weights are large enough that every part shows, and windows, chunks
and scaling thresholds are shorter than the sequences. A row without a suffix has the defaults of its configuration
class; a row with `-published` is made for a checkpoint that differs from them in kind.

The engine runs prompts of several lengths, in chunks, some of them late, greedy and sampled. The trainer runs packed
samples of one prompt, with gradients. Log-probabilities of both are compared with Transformers' full forward pass over
each sequence alone. In fp32 they agree to 1e-3 nats. In bf16 their errors are at most 1.2 times Transformers' own.
"Fused" runs with fused kernels, "unfused" as Transformers runs it. Command:
`python tests/helpers/family_table.py > docs/families.md`.

{counts}
"""
MULTIMODAL = """
## Multimodal models

The engine draws text from text. It leaves out towers for images and sound. A model that is "not built" has no small
configuration here, or needs a package. {counts}
"""
OTHERS = """
## Encoder-decoders and encoders

The engine runs none of them. {counts}
"""
HEAD = "| family | engine | why | trainer |\n|---|---|---|---|"
CHECKPOINTS_HEAD = "| checkpoint | row | engine |\n|---|---|---|"


def row(result: Result) -> str:
    """Write a row of the table of families."""
    why = result.engine.reason
    trainer = result.trainer.kind + (f": {result.trainer.reason}" if result.trainer.reason else "")
    return " | ".join(["", result.family, result.engine.kind, _cell(why), _cell(trainer), ""]).strip()


def _cell(text: str, longest: int = 200) -> str:
    text = text.replace("|", "\\|")
    if len(text) <= longest or text.endswith(" …"):
        return text
    return text[: text.rindex(" ", 0, longest)] + " …"


def rows_of(page: str) -> list[Result]:
    """Read the rows of a page that this program wrote."""
    split = (re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines())
    rows = [[cell.strip().replace("\\|", "|") for cell in cells] for cells in split if len(cells) == 4]
    return [
        Result(family, Outcome(engine, why), Outcome(*trainer.partition(": ")[::2]))
        for family, engine, why, trainer in rows
        if family not in ("family", "---")
    ]


def _counts(results: list[Result]) -> str:
    sides = (
        ("engine", [result.engine.kind for result in results]),
        ("trainer", [result.trainer.kind for result in results]),
    )
    counts = (
        f"{side}: " + ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).most_common())
        for side, kinds in sides
    )
    return f"{len(results)} rows. {'; '.join(counts)}."


def _table(results: list[Result]) -> str:
    rows = sorted(results, key=lambda result: result.family)
    return "\n".join([HEAD, *(row(result) for result in rows)])


def _checkpoints(results: list[Result]) -> str:
    engine = {result.family: result.engine.kind for result in results}
    known = sorted(rows_of_checkpoints().items(), key=lambda item: item[0].lower())
    rows = [f"| {checkpoint} | {name} | {engine[name]} |" for checkpoint, name in known if name in engine]
    return "\n".join([CHECKPOINTS_HEAD, *rows])


def _is_named(family: Family, names: list[str]) -> bool:
    return not names or family.name in names or family.model_type in names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--keep", type=Path, help="copy the rows that are not measured from this page")
    arguments = parser.parse_args()
    kept = {result.family: result for result in rows_of(arguments.keep.read_text())} if arguments.keep else {}
    disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    causal, multimodal, others = [], [], []
    kinds = [(causal_families(), causal), (multimodal_families(), multimodal)]
    for family in all_families():
        if _is_named(family, arguments.families):
            result = check_family(family)
            print(row(result), file=sys.stderr, flush=True)
        elif family.name in kept:
            result = kept[family.name]
        else:
            continue
        next((rows for names, rows in kinds if family.model_type in names), others).append(result)
    version = transformers.__version__
    print(INTRODUCTION.format(version=version, checkpoints=_checkpoints(causal), counts=_counts(causal)))
    print(_table(causal))
    for heading, rows in ((MULTIMODAL, multimodal), (OTHERS, others)):
        if rows:
            print(heading.format(counts=_counts(rows)))
            print(_table(rows))
    outcomes = [outcome for result in causal + multimodal + others for outcome in (result.engine, result.trainer)]
    return int(any(outcome.kind not in (*GOOD, NOT_BUILT) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
