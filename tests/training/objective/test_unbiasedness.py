"""What each correction's gradient is in expectation, over every sequence that several versions can have drawn.

`python benchmarks/correction_bias.py` tables the biases for several distances between versions.
"""

from dataclasses import replace
from functools import cache
from math import exp, log

import plain_objectives as plain
import pytest
import torch
from plain_objectives import PLAIN_PRESETS, Plain, Token
from tabular_policy import (
    LENGTH,
    OBJECTIVES,
    OWNERS,
    PREFIXES,
    ROWS,
    SEQUENCE_RATIO,
    SEQUENCES,
    TOKENS,
    VOCABULARY,
    World,
    bias,
    bias_table,
    distance,
    expect,
    make_batch,
    make_world,
    sequence_probabilities,
    token_gradients,
)

PATTERNS = [(0, 0, 1, 2), (0, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 2), (0, 0, 0, 0), (2, 0, 1, 0)]
"""The version that draws each position; the trainer is version 3."""
SWITCHING = (0, 0, 1, 2)

PLAIN_OBJECTIVES = {
    "sequence ratio, no bound": Plain(lambda sequence: plain.sequence_truncate(sequence, cap=float("inf"))),
    "token ratio, no bound": Plain(lambda sequence: plain.token_truncate(sequence, cap=float("inf"))),
    **PLAIN_PRESETS,
}


@cache
def world(step: float = 0.3) -> World:
    return make_world(step, seed=11)


def relative_error(estimate: torch.Tensor, truth: torch.Tensor) -> float:
    return ((estimate - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_versions_draw_together_is_a_distribution(pattern):
    probabilities = sequence_probabilities(world().drawn_by(pattern))
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-14)
    assert len(SEQUENCES) == len(set(SEQUENCES)) == 4**3 * 5 + 4**2 + 4 + 1


@pytest.mark.parametrize("step", [0.03, 0.3, 0.6])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_whole_ratio_of_recorded_logprobs_gives_the_on_policy_gradient(pattern, step):
    apart = distance(world(step), pattern)
    assert apart["max_abs_log_ratio_of_sequence"] < 20  # beyond, ratios are cut
    assert apart["kl_per_token"] > 0
    estimate = expect(SEQUENCE_RATIO, world(step), pattern)
    assert relative_error(estimate.gradient, world(step).on_policy_gradient()) < 1e-12


def test_on_policy_every_objective_gives_the_on_policy_gradient():
    truth = world().on_policy_gradient()
    for name, objective in OBJECTIVES.items():
        estimate = expect(objective, world(), (3, 3, 3, 3))
        assert relative_error(estimate.gradient, truth) < 1e-12, name


def stated_target(objective: Plain, of_world: World, pattern: tuple[int, ...]) -> torch.Tensor:
    """Σ over sequences of π_b(sequence) · Σ_t c_t ∇log π_θ(token t), in loops, with c_t from the plain formulas."""
    prefixes = list(PREFIXES)
    tables = [
        {prefix: softmax(row) for prefix, row in zip(prefixes, table.tolist(), strict=True)}
        for table in of_world.tables
    ]
    current, proximal = tables[-1], tables[max(pattern)]
    drawn, probabilities = [], []
    for sequence in SEQUENCES:
        tokens, probability = [], 1.0
        for t, token in enumerate(sequence):
            prefix, version = sequence[:t], pattern[t]
            behavior = tables[version][prefix][token]
            probability *= behavior
            logs = (log(table[prefix][token]) for table in (current, tables[version], proximal))
            tokens.append(Token(*logs, version=version))
        drawn.append(tokens)
        probabilities.append(probability)
    rewards = of_world.rewards.tolist()
    baseline = sum(p * reward for p, reward in zip(probabilities, rewards, strict=True))
    out = {prefix: [0.0] * VOCABULARY for prefix in prefixes}
    together = replace(objective, aggregation="constant", max_tokens=1)
    for tokens, reward in zip(drawn, rewards, strict=True):
        for token in tokens:
            token.advantage = reward - baseline
    gradients = plain.evaluate(together, drawn, [0] * len(drawn), len(tables) - 1).gradient
    for sequence, probability, gradient in zip(SEQUENCES, probabilities, gradients, strict=True):
        for t, (token, derivative) in enumerate(zip(sequence, gradient, strict=True)):
            row = out[sequence[:t]]
            for other, share in enumerate(current[sequence[:t]]):
                row[other] -= len(drawn) * probability * derivative * ((other == token) - share)
    return torch.tensor([out[prefix] for prefix in prefixes], dtype=torch.float64)


def softmax(row: list[float]) -> list[float]:
    powers = [exp(value) for value in row]
    return [power / sum(powers) for power in powers]


def test_every_objective_has_a_stated_target():
    assert PLAIN_OBJECTIVES.keys() == OBJECTIVES.keys()


@pytest.mark.parametrize("pattern", [SWITCHING, (1, 2, 2, 2)])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_gives_its_own_target(name, pattern):
    expected = stated_target(PLAIN_OBJECTIVES[name], world(), pattern)
    ours = expect(OBJECTIVES[name], world(), pattern).gradient
    tolerance = 1e-7 if name == "loglinear_ppo" else 1e-12  # its α is rounded to float32
    assert relative_error(ours, expected) < tolerance


def test_whatever_bounds_a_ratio_or_takes_it_by_token_is_biased():
    table = bias_table(world(), SWITCHING)
    apart = distance(world(), SWITCHING)
    assert 0 < apart["tokens_above_2"] < 0.1
    assert table["sequence ratio, no bound"]["relative_error"] < 1e-12
    for name in OBJECTIVES.keys() - {"sequence ratio, no bound"}:
        assert table[name]["relative_error"] > 0.05, name
    assert table["tis"]["relative_error"] < table["none"]["relative_error"]
    noise = {name: row["relative_noise"] for name, row in table.items()}
    assert noise["sequence_tis"] < noise["sequence ratio, no bound"]  # what a bound's bias buys
    assert noise["tis"] < noise["token ratio, no bound"]


@pytest.mark.parametrize("pattern", [(0, 0, 1, 2), (0, 1, 2, 2), (0, 0, 2, 2)])
@pytest.mark.parametrize("version", ["oldest", "newest", "trainer"])
def test_one_version_for_the_whole_sequence_is_wrong(version, pattern):
    """What a recompute of π_b gives, or an engine that labels a sequence with one version."""
    one = {"oldest": min(pattern), "newest": max(pattern), "trainer": world().trainer_version}[version]
    truth = world().on_policy_gradient()
    estimate = expect(SEQUENCE_RATIO, world(), pattern, recorded=world().logprobs(one))
    assert bias(estimate, truth)["relative_error"] > 0.25
    if version == "trainer":
        uncorrected = expect(OBJECTIVES["none"], world(), pattern)
        assert torch.allclose(estimate.gradient, uncorrected.gradient, rtol=0, atol=1e-15)


def test_one_version_is_right_where_one_version_drew():
    truth = world().on_policy_gradient()
    estimate = expect(SEQUENCE_RATIO, world(), (1, 1, 1, 1), recorded=world().logprobs(1))
    assert relative_error(estimate.gradient, truth) < 1e-12


def penalised(table: torch.Tensor, penalty: float) -> torch.Tensor:
    """The logits with a repetition penalty on the tokens that were drawn before."""
    out = table.clone()
    for prefix, row in PREFIXES.items():
        for token in set(prefix):
            out[row, token] = table[row, token] / penalty if table[row, token] > 0 else table[row, token] * penalty
    return out


def test_the_full_ratio_is_unbiased_with_a_repetition_penalty_or_a_finite_logit_bias():
    """The policy that draws is the penalised one, as recorded, and the gradient that of the model without penalty."""
    model = world().tables[-1]
    biased = model + torch.tensor([-2.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    for table in (penalised(model, 1.5), biased):
        of_penalty = World([table, model], world().rewards)
        truth = of_penalty.on_policy_gradient()
        errors = {
            name: relative_error(expect(OBJECTIVES[name], of_penalty, (0,) * LENGTH).gradient, truth)
            for name in ("sequence ratio, no bound", "tis", "none")
        }
        assert errors["sequence ratio, no bound"] < 1e-12
        assert errors["tis"] > 0.05
        assert errors["none"] > 0.05


def test_no_ratio_makes_up_for_tokens_that_are_never_drawn():
    """As with `min_tokens`: it rules the end out."""
    model = world().tables[-1]
    table = model.clone()
    table[PREFIXES[()], 0] = -100.0
    ruled_out = World([table, model], world().rewards)
    estimate = expect(SEQUENCE_RATIO, ruled_out, (0,) * LENGTH).gradient
    assert relative_error(estimate, ruled_out.on_policy_gradient()) > 0.05


SAMPLES = 2**15


@pytest.mark.medium
@pytest.mark.parametrize("name", ["sequence ratio, no bound", "tis", "sequence_tis", "icepop", "ppo_clip"])
def test_sampled_gradients_agree_with_the_enumeration(name):
    """Token by token from the version that is live at each position; projected on random directions."""
    random = torch.Generator().manual_seed(5)
    lookup = {sequence: index for index, sequence in enumerate(SEQUENCES)}
    policies = [table.softmax(-1) for table in world().tables]
    chosen = []
    uniforms = torch.rand(SAMPLES, LENGTH, generator=random, dtype=torch.float64).tolist()
    cumulative = [[row.cumsum(0).tolist() for row in policy] for policy in policies]
    for row in uniforms:
        prefix: tuple[int, ...] = ()
        while prefix not in lookup:
            bounds = cumulative[SWITCHING[len(prefix)]][PREFIXES[prefix]]
            token = sum(row[len(prefix)] > bound for bound in bounds[:-1])
            prefix = (*prefix, token)
        chosen.append(lookup[prefix])
    counts = torch.bincount(torch.tensor(chosen), minlength=len(SEQUENCES)).double()

    gradients = token_gradients(OBJECTIVES[name], make_batch(world(), SWITCHING), world().logprobs(3))
    truth = world().on_policy_gradient()
    directions = [torch.randn(truth.shape, generator=random, dtype=torch.float64) for _ in range(12)]
    scores = torch.nn.functional.one_hot(TOKENS, VOCABULARY) - policies[-1][ROWS]
    enumerated = expect(OBJECTIVES[name], world(), SWITCHING).gradient
    if name != "sequence ratio, no bound":
        directions.append(enumerated - truth)
    for direction in directions:
        of_sequences = torch.zeros(len(SEQUENCES), dtype=torch.float64).index_add(
            0, OWNERS, gradients * (scores * direction[ROWS]).sum(-1)
        )
        mean = (counts * of_sequences).sum() / SAMPLES
        variance = (counts * of_sequences.square()).sum() / SAMPLES - mean**2
        error = (variance / SAMPLES).sqrt()
        assert abs(mean - (enumerated * direction).sum()) < 4 * error
    if name != "sequence ratio, no bound":  # the last direction is that of the bias, which so many samples show
        assert abs(mean - (truth * direction).sum()) > 8 * error
