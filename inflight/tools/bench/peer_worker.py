"""The worker's side of `inflight bench throughput`: a process that generates on request, JSON lines in and out.

Every side of the comparison is such a process, ours too. This module runs in the peer's interpreter as well, which has
none of our packages, hence it needs only the standard library.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Says what a worker loads; as JSON it is the first argument of its command line, before the side's name."""

    model: str
    """A directory or a hub id; the same weights for every worker."""
    device: str
    """Either cpu or cuda."""
    dtype: str
    vocab_size: int
    max_sequences: int
    max_context: int
    kv_bytes_per_token: int
    threads: int
    """CPU threads; 0 leaves torch's own choice."""
    seed: int
    shared_prompts: bool = False
    """Several sequences have one prompt, so that a cache of prefixes pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Draw at temperature 1 for each of `sequences` random prompts. Lengths are uniform from the first to the
    second number, both included."""

    sequences: int
    tokens: tuple[int, int]
    prompt_tokens: tuple[int, int]
    seed: int
    group: int = 1
    """So many sequences have one prompt. More than one: others wait while the first ones are drawn."""
    publishes: int = 0
    """How often new weights are loaded meanwhile (`inflight bench swap`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker's first line, which says that it is ready."""

    mode: str
    """The way to generate that is measured, of those that the library has."""
    threads: int
    versions: dict[str, str]
    copy_gb_s: float | None = None
    """Bytes read and written per second by a device copy, in GB/s; only ours measures it, and only on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A worker's answer to a job."""

    seconds: float
    """Seconds from submitting the prompts to the last token."""
    tokens: int
    logprob_mean: float
    """The mean of the log-probabilities that were recorded when the tokens were drawn."""
    detail: dict[str, float] = field(default_factory=dict)
    """A swap has `stall_p50_ms` and `stall_p99_ms`. Throughput has what only our own engine tells: `step_ms` (median of
    the steps that drew for every sequence), `prefill_s`, and over those steps the means `decode_step_s` and
    `context_tokens` (of all sequences together)."""
    cpu_s: float = 0.0
    """CPU time that the process used for the job, over all its threads, and the process of its engine where that is
    another one."""
    idle_cpu: float = 0.0
    """The share of a core that it used between its last answer and this job."""


Generate = Callable[[Job], Run]


def random_requests(job: Job, vocab_size: int) -> list[tuple[list[int], int]]:
    """Return the job's prompts as token ids, and how many tokens are drawn after each; all workers get the same."""
    draw = random.Random(job.seed)
    lengths = [(draw.randint(*job.prompt_tokens), draw.randint(*job.tokens)) for _ in range(job.sequences)]
    prompts = [[draw.randrange(vocab_size) for _ in range(length)] for length, _ in lengths[:: job.group]]
    return [(prompts[index // job.group], tokens) for index, (_, tokens) in enumerate(lengths)]


def serve(load: Callable[[Setup], tuple[Hello, Generate]]) -> None:
    """Load, say hello, then answer a job per line until standard input ends.

    Standard output belongs to the answers alone: whatever a library prints goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def answer(data: Any) -> None:
        print(json.dumps(asdict(data)), file=answers, flush=True)

    hello, generate = load(Setup(**json.loads(sys.argv[1])))
    answer(hello)
    answered, answered_cpu = time.monotonic(), time.process_time()
    for line in sys.stdin:
        began, began_cpu = time.monotonic(), time.process_time()
        run = generate(Job(**json.loads(line)))
        idle_cpu = (began_cpu - answered_cpu) / max(began - answered, 1e-9)
        answered, answered_cpu = time.monotonic(), time.process_time()
        answer(replace(run, cpu_s=run.cpu_s + answered_cpu - began_cpu, idle_cpu=idle_cpu))
