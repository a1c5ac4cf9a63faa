"""What the truth-teller of `inflight.tools.bench` draws, restated: token ids and their log-probabilities."""

import math

LOGPROBS = [(-math.log1p(math.exp(-gap)), -gap - math.log1p(math.exp(-gap))) for gap in (1.875, 3.75, 5.625)]
"""Of the first and the second token of versions 0, 1 and 2, after which it begins anew."""


def drawn(version: int, *, second: bool = False, logprob: float | None = None) -> tuple[int, float]:
    return 2 * version + 1 + second, LOGPROBS[version % 3][second] if logprob is None else logprob
