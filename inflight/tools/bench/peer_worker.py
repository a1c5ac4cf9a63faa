"""Worker side of `inflight bench throughput`: a process that generates on request, with JSON lines as input and output.

Every engine of the comparison is such a process. This module also runs in the peer's interpreter, without our packages.
Hence it needs only the standard library.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Model and limits of a worker. As JSON it is the first argument of the command line, before the name of the
    engine."""

    model: str
    """Directory or hub id; the same weights for every worker."""
    device: str
    """Either cpu or cuda."""
    dtype: str
    vocab_size: int
    max_sequences: int
    max_context: int
    kv_bytes_per_token: int
    threads: int
    """CPU threads; 0: the default of torch."""
    seed: int
    shared_prompts: bool = False
    """Several sequences share a prompt, so that a prefix cache saves work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Draw at temperature 1 for each of `sequences` random prompts. Lengths are uniform from the first to the
    second number, both included."""

    sequences: int
    tokens: tuple[int, int]
    prompt_tokens: tuple[int, int]
    seed: int
    group: int = 1
    """Number of sequences with the same prompt. Above 1, other sequences wait in the queue."""
    publishes: int = 0
    """Number of weight updates during the job (`inflight bench swap`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First line of a worker. It is ready."""

    mode: str
    """Measured way to generate, if the library has several."""
    threads: int
    versions: dict[str, str]
    copy_gb_s: float | None = None
    """Bytes read and written per second by a device copy, in GB/s. Only our worker measures it, and only on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Response of a worker to a job."""

    seconds: float
    """Seconds from submitting the prompts to the last token."""
    tokens: int
    logprob_mean: float
    """Mean of the log-probabilities recorded with the draws."""
    detail: dict[str, float] = field(default_factory=dict)
    """Details. A swap has `stall_p50_ms`, `stall_p99_ms` and `num_stalls`. Throughput of inflight has means over the
    steps that drew for every sequence: `decode_step_s` and `context_tokens` (of all sequences together)."""


Generate = Callable[[Job], Run]


def random_requests(job: Job, vocab_size: int) -> list[tuple[list[int], int]]:
    """Return the prompts of a job as token ids, each with its number of tokens to draw. All workers get the same."""
    draw = random.Random(job.seed)
    lengths = [(draw.randint(*job.prompt_tokens), draw.randint(*job.tokens)) for _ in range(job.sequences)]
    prompts = [[draw.randrange(vocab_size) for _ in range(length)] for length, _ in lengths[:: job.group]]
    return [(prompts[index // job.group], tokens) for index, (_, tokens) in enumerate(lengths)]


def serve(load: Callable[[Setup], tuple[Hello, Generate]]) -> None:
    """Load the model, print the first line, then run one job per line until standard input ends.

    Standard output has only the responses: output of libraries is redirected to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def answer(data: Any) -> None:
        print(json.dumps(asdict(data)), file=answers, flush=True)

    hello, generate = load(Setup(**json.loads(sys.argv[1])))
    answer(hello)
    for line in sys.stdin:
        answer(generate(Job(**json.loads(line))))
