"""Every formula of `inflight.training` once more: floats, and loops over the tokens of a sequence.

Gradients are by hand. Bounds are written out, so that the defaults of the library are under test too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import exp, inf, log


@dataclass
class Token:
    logprob: float
    behavior: float
    proximal: float = 0.0
    advantage: float = 0.0
    version: int = 0
    reference: float = 0.0
    entropy: float = 0.0
    lag: int = 0


Sequence = list[Token]


def bounded_exp(x: float) -> float:
    return exp(min(max(x, -20.0), 20.0))


def slope(x: float) -> float:
    """The derivative of `bounded_exp`."""
    return exp(x) if abs(x) <= 20 else 0.0


# Corrections: (weight, whether a bound was met) of each token of a sequence.

Weights = list[tuple[float, bool]]


def uncorrected(sequence: Sequence) -> Weights:
    return [(1.0, False) for _ in sequence]


def truncated(weight: float, cap: float, floor: float) -> tuple[float, bool]:
    if weight > cap:
        return cap, True
    if weight < floor:
        return floor, True
    return weight, False


def masked(weight: float, low: float, high: float) -> tuple[float, bool]:
    return (0.0, True) if weight < low or weight > high else (weight, False)


def token_truncate(sequence: Sequence, cap: float = 2.0, floor: float = 0.0) -> Weights:
    return [truncated(bounded_exp(t.proximal - t.behavior), cap, floor) for t in sequence]


def token_mask(sequence: Sequence, low: float = 0.5, high: float = 5.0) -> Weights:
    return [masked(bounded_exp(t.proximal - t.behavior), low, high) for t in sequence]


def product(sequence: Sequence) -> float:
    total = 0.0
    for t in sequence:
        total += t.proximal - t.behavior
    return bounded_exp(total)


def sequence_truncate(sequence: Sequence, cap: float = 2.0, floor: float = 0.0) -> Weights:
    return [truncated(product(sequence), cap, floor) for _ in sequence]


def sequence_mask(sequence: Sequence, low: float = 0.5, high: float = 2.0) -> Weights:
    return [masked(product(sequence), low, high) for _ in sequence]


def vespo(
    sequence: Sequence, positive: tuple[float, float] = (2.0, 3.0), negative: tuple[float, float] = (3.0, 2.0)
) -> Weights:
    total = product(sequence)
    pairs = [negative if t.advantage < 0 else positive for t in sequence]
    return [(exp(decay) * total**power * exp(-decay * total), False) for power, decay in pairs]


# Surrogates: (loss, its derivatives by the log-probabilities of the sequence, whether a bound was met) of each token.

Losses = list[tuple[float, list[float], bool]]


def unit(index: int, value: float, length: int) -> list[float]:
    return [value if j == index else 0.0 for j in range(length)]


def reinforce(sequence: Sequence) -> Losses:
    n = len(sequence)
    return [(-t.advantage * t.logprob, unit(i, -t.advantage, n), False) for i, t in enumerate(sequence)]


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, bool]:
    """(gain, whether it is constant)"""
    if advantage > 0 and ratio > 1 + high:
        return (1 + high) * advantage, True
    if advantage < 0 and ratio < 1 - low:
        return (1 - low) * advantage, True
    if advantage < 0 and dual is not None and ratio > dual:
        return dual * advantage, True
    return ratio * advantage, False


def ppo_clip(sequence: Sequence, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Losses:
    out: Losses = []
    for i, t in enumerate(sequence):
        x = t.logprob - t.proximal
        gain, constant = clipped(bounded_exp(x), t.advantage, low, high, dual)
        out.append((-gain, unit(i, 0.0 if constant else -t.advantage * slope(x), len(sequence)), constant))
    return out


def cispo(sequence: Sequence, cap: float = 5.0, floor: float = 0.0) -> Losses:
    out: Losses = []
    for i, t in enumerate(sequence):
        weight, bounded = truncated(bounded_exp(t.logprob - t.proximal), cap, floor)
        out.append((-weight * t.advantage * t.logprob, unit(i, -weight * t.advantage, len(sequence)), bounded))
    return out


def sapo(sequence: Sequence, positive: float = 1.0, negative: float = 1.05) -> Losses:
    out: Losses = []
    for i, t in enumerate(sequence):
        x, temperature = t.logprob - t.proximal, positive if t.advantage > 0 else negative
        gate = 1 / (1 + exp(-temperature * (bounded_exp(x) - 1)))
        by_logprob = -4 * gate * (1 - gate) * slope(x) * t.advantage
        out.append((-4 / temperature * gate * t.advantage, unit(i, by_logprob, len(sequence)), False))
    return out


def gspo(sequence: Sequence, low: float = 3e-4, high: float = 4e-4) -> Losses:
    """s_t has the value of the sequence's ratio, and the slope of its own token's."""
    n = len(sequence)
    x = sum(t.logprob - t.proximal for t in sequence) / max(n, 1)
    out: Losses = []
    for i, t in enumerate(sequence):
        gain, constant = clipped(bounded_exp(x), t.advantage, low, high, None)
        out.append((-gain, unit(i, 0.0 if constant else -t.advantage * slope(x), n), constant))
    return out


def gmpo(sequence: Sequence, low: float = 0.4, high: float = 0.4) -> Losses:
    """A clipped token is a constant factor of the mean, so that it changes the gradients of the whole sequence."""
    n = len(sequence)
    logs = [t.logprob - t.proximal for t in sequence]
    bounds = [(-inf, high) if t.advantage > 0 else (-low, inf) if t.advantage < 0 else (-inf, inf) for t in sequence]
    kept = [min(max(x, least), most) for x, (least, most) in zip(logs, bounds, strict=True)]
    mean = bounded_exp(sum(kept) / max(n, 1))
    out: Losses = []
    for i, t in enumerate(sequence):
        by_logprob = -mean * t.advantage if kept[i] == logs[i] else 0.0
        out.append((-mean * t.advantage, unit(i, by_logprob, n), kept != logs))
    return out


def lag_clip(sequence: Sequence, low: float = 0.2, high: float = 0.2, growth: float = 0.5) -> Losses:
    out: Losses = []
    for i, t in enumerate(sequence):
        x, steps = t.logprob - t.proximal, max(t.lag, 1) ** growth
        gain, constant = clipped(bounded_exp(x), t.advantage, 1 - (1 - low) ** steps, (1 + high) ** steps - 1, None)
        out.append((-gain, unit(i, 0.0 if constant else -t.advantage * slope(x), len(sequence)), constant))
    return out


# Trust regions: whether each token of each sequence takes part.

Kept = list[list[bool]]


def geometric_mask(batch: list[Sequence], low: float = 0.99, high: float = 1.01) -> Kept:
    kept: Kept = []
    for sequence in batch:
        mean = exp(sum(t.proximal - t.behavior for t in sequence) / max(len(sequence), 1))
        kept.append([low <= mean <= high] * len(sequence))
    return kept


def binary_tv_mask(batch: list[Sequence], delta: float = 0.2) -> Kept:
    def takes_part(t: Token) -> bool:
        moved = exp(t.logprob) - exp(t.behavior)
        if t.advantage > 0:
            return moved <= delta
        return moved >= -delta if t.advantage < 0 else True

    return [[takes_part(t) for t in sequence] for sequence in batch]


def binary_kl(p: float, q: float) -> float:
    """KL of two outcomes with probabilities p and 1 − p, and q and 1 − q."""
    return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))


def binary_kl_mask(batch: list[Sequence], delta: float = 0.05) -> Kept:
    def takes_part(t: Token) -> bool:
        p, q = exp(t.logprob), exp(t.behavior)
        away = (t.advantage > 0 and p > q) or (t.advantage < 0 and p < q)
        return not away or binary_kl(q, p) <= delta

    return [[takes_part(t) for t in sequence] for sequence in batch]


def kpop_mask(batch: list[Sequence], delta: float = 0.1) -> Kept:
    pairs = [[(exp(t.logprob), exp(t.behavior)) for t in sequence] for sequence in batch]
    return [[max(binary_kl(p, q), binary_kl(q, p)) <= delta for p, q in sequence] for sequence in pairs]


def opsm_mask(batch: list[Sequence], delta: float = 1e-4) -> Kept:
    kept: Kept = []
    for sequence in batch:
        drift = sum(t.behavior - t.logprob for t in sequence) / max(len(sequence), 1)
        kept.append([t.advantage >= 0 or drift <= delta for t in sequence])
    return kept


def within_second_moment(batch: list[Sequence], candidate: Callable[[Token], bool], bound: float) -> Kept:
    """One candidate after the other leaves, the one with the largest square first, until the mean of those that remain
    is within the bound."""
    kept = [[True] * len(sequence) for sequence in batch]
    remaining = sorted(
        ((t.logprob - t.behavior) ** 2, s, i)
        for s, sequence in enumerate(batch)
        for i, t in enumerate(sequence)
        if candidate(t)
    )
    while remaining and sum(square for square, _, _ in remaining) / len(remaining) > bound:
        _, s, i = remaining.pop()
        kept[s][i] = False
    return kept


def m2po_mask(batch: list[Sequence], bound: float = 0.04) -> Kept:
    def pushed(t: Token) -> bool:
        return (t.advantage > 0 and t.logprob > t.behavior) or (t.advantage < 0 and t.logprob < t.behavior)

    return within_second_moment(batch, pushed, bound)


def second_moment_mask(batch: list[Sequence], bound: float = 0.04) -> Kept:
    return within_second_moment(batch, lambda t: True, bound)


# Aggregations, KL estimators and π_p.


def aggregation_weight(kind: str, batch: list[Sequence], groups: list[int], s: int, max_tokens: int | None) -> float:
    """Of a token of sequence s of the whole step."""
    if kind == "token":
        return 1 / sum(len(sequence) for sequence in batch)
    if kind == "sequence":
        return 1 / len(batch) / len(batch[s])
    if kind == "group":
        own = sum(len(sequence) for sequence, group in zip(batch, groups, strict=True) if group == groups[s])
        return 1 / len(set(groups)) / own
    assert kind == "constant"
    assert max_tokens is not None
    return 1 / len(batch) / max_tokens


def kl_term(kind: str, t: Token) -> tuple[float, float]:
    """(estimate, derivative by log π_θ)"""
    r = exp(t.reference - t.logprob)
    if kind == "k1":
        return -log(r), 1.0
    if kind == "k2":
        return log(r) ** 2 / 2, -log(r)
    assert kind == "k3"
    return r - 1 - log(r), 1 - r


def corrected_kl_term(kind: str, t: Token) -> tuple[float, float]:
    """The same, weighted by ρ; k2 by its value alone."""
    estimate, derivative = kl_term(kind, t)
    x = t.logprob - t.behavior
    return bounded_exp(x) * estimate, bounded_exp(x) * derivative + (0.0 if kind == "k2" else slope(x) * estimate)


def loglinear(t: Token, trainer_version: int) -> float:
    """The proximal policy is version trainer − 1, on the line from the token's version to the trainer's."""
    if t.version >= trainer_version - 1:
        return t.behavior
    share = (trainer_version - 1 - t.version) / (trainer_version - t.version)
    return (1 - share) * t.behavior + share * t.logprob


@dataclass
class Plain:
    """An objective; `Objective` in floats."""

    correction: Callable[[Sequence], Weights] = token_truncate
    surrogate: Callable[[Sequence], Losses] = reinforce
    trust_regions: tuple[Callable[[list[Sequence]], Kept], ...] = ()
    aggregation: str = "token"
    max_tokens: int | None = None
    proximal: str = "current"
    kl: str = "k3"
    kl_weight: float = 0.0
    drift_weight: float = 0.0
    entropy_weight: float = 0.0


@dataclass
class Result:
    loss: float
    gradient: list[list[float]] = field(default_factory=list)
    """By log π_θ of each token of each sequence."""
    num_clipped: int = 0


def evaluate(plain: Plain, batch: list[Sequence], groups: list[int], trainer_version: int) -> Result:
    """The loss of a whole step. Sets the tokens' π_p, except "recomputed", where they have it."""
    for t in (t for sequence in batch for t in sequence):
        t.lag = max(trainer_version - t.version, 0)
        if plain.proximal == "current":
            t.proximal = t.logprob
        elif plain.proximal == "behavior":
            t.proximal = t.behavior
        elif plain.proximal == "loglinear":
            t.proximal = loglinear(t, trainer_version)
    regions = [region(batch) for region in plain.trust_regions]
    result = Result(0.0)
    for s, sequence in enumerate(batch):
        gradient = [0.0] * len(sequence)
        weights, losses = plain.correction(sequence), plain.surrogate(sequence)
        for i, t in enumerate(sequence):
            a = aggregation_weight(plain.aggregation, batch, groups, s, plain.max_tokens)
            (w, weight_bounded), (loss, derivatives, loss_bounded) = weights[i], losses[i]
            takes_part = all(region[s][i] for region in regions)
            if takes_part:
                result.loss += a * w * loss
                for j, derivative in enumerate(derivatives):
                    gradient[j] += a * w * derivative
            estimate, derivative = corrected_kl_term(plain.kl, t)
            result.loss += a * (plain.kl_weight * estimate - plain.entropy_weight * t.entropy)
            gradient[i] += a * plain.kl_weight * derivative
            result.loss += a * plain.drift_weight * (t.logprob - t.behavior) ** 2
            gradient[i] += a * plain.drift_weight * 2 * (t.logprob - t.behavior)
            result.num_clipped += t.advantage != 0 and (weight_bounded or loss_bounded or not takes_part)
        result.gradient.append(gradient)
    return result


PLAIN_PRESETS: dict[str, Plain] = {
    "none": Plain(uncorrected),
    "tis": Plain(partial(token_truncate, cap=2.0)),
    "icepop": Plain(partial(token_mask, low=0.5, high=5.0)),
    "sequence_tis": Plain(partial(sequence_truncate, cap=2.0)),
    "sequence_mask": Plain(partial(sequence_mask, low=0.5, high=2.0)),
    "vespo": Plain(partial(vespo, positive=(2.0, 3.0), negative=(3.0, 2.0))),
    "geometric_mask": Plain(trust_regions=(partial(geometric_mask, low=0.99, high=1.01),)),
    "ppo_clip": Plain(uncorrected, partial(ppo_clip, low=0.2, high=0.2), proximal="behavior"),
    "cispo": Plain(uncorrected, partial(cispo, cap=5.0), proximal="behavior"),
    "sapo": Plain(uncorrected, partial(sapo, positive=1.0, negative=1.05), proximal="behavior"),
    "gspo": Plain(uncorrected, partial(gspo, low=3e-4, high=4e-4), proximal="behavior", aggregation="sequence"),
    "gmpo": Plain(uncorrected, partial(gmpo, low=0.4, high=0.4), proximal="behavior", aggregation="sequence"),
    "lag_clip": Plain(uncorrected, partial(lag_clip, low=0.2, high=0.2, growth=0.5), proximal="behavior"),
    "decoupled_ppo": Plain(surrogate=ppo_clip, proximal="recomputed"),
    "loglinear_ppo": Plain(surrogate=ppo_clip, proximal="loglinear"),
    "dppo": Plain(partial(token_truncate, cap=inf), trust_regions=(partial(binary_tv_mask, delta=0.2),)),
    "dppo_kl": Plain(
        partial(token_truncate, cap=inf), trust_regions=(partial(binary_tv_mask, delta=0.2),), drift_weight=1e-3
    ),
    "dppo_binary_kl": Plain(partial(token_truncate, cap=inf), trust_regions=(partial(binary_kl_mask, delta=0.05),)),
    "kpop": Plain(partial(token_truncate, cap=inf), trust_regions=(partial(kpop_mask, delta=0.1),)),
    "dro": Plain(uncorrected, drift_weight=0.05 / 2),
    "opsm": Plain(
        uncorrected,
        partial(ppo_clip, low=0.2, high=0.2),
        trust_regions=(partial(opsm_mask, delta=1e-4),),
        proximal="behavior",
    ),
    "m2po": Plain(partial(token_truncate, cap=inf), trust_regions=(partial(m2po_mask, bound=0.04),)),
    "second_moment": Plain(partial(token_truncate, cap=inf), trust_regions=(partial(second_moment_mask, bound=0.04),)),
}
