"""Advantages of branching episodes are their formulas, restated over explicit paths, and "rloo" is unbiased."""

import math
from dataclasses import replace
from itertools import product
from statistics import fmean, pstdev

import numpy as np
import pytest
from made_batches import make_group

import inflight
from inflight.core.rollout import Rollout, Turn
from inflight.training.data.advantages import resolve_advantages

KINDS = ["rloo", "treerl", "tree_grpo", "treepo", "vineppo"]


def sequence(request: int, sample: int, turns: list[tuple[int, bool, float | None]], forked_from=None) -> Rollout:
    """turns: (number of tokens, drawn, reward)."""
    [rollout] = make_group(np.random.default_rng(0), 0, 1, 1)
    made, begin = [], 0
    for length, drawn, reward in turns:
        made.append(Turn(begin, begin + length, drawn, reward))
        begin += length
    ids = np.zeros(begin, np.int32)
    return replace(
        rollout,
        request_id=request,
        sample=sample,
        token_ids=ids,
        turns=tuple(made),
        forked_from=forked_from,
        reward=0.0,
    )


def random_group(rng: np.random.Generator) -> list[Rollout]:
    group: list[Rollout] = []
    for sample in range(int(rng.integers(1, 4))):
        own: list[Rollout] = []
        for _ in range(int(rng.integers(1, 6))):
            turns = [
                (int(rng.integers(0, 5)), bool(rng.random() < 0.7), float(rng.integers(-2, 3)))
                for _ in range(int(rng.integers(1, 4)))
            ]
            turns.append((int(rng.integers(1, 4)), True, float(rng.normal())))
            origin = None
            if own:
                parent = own[int(rng.integers(len(own)))]
                origin = (parent.request_id, int(rng.integers(0, len(parent.token_ids) + 1)))
            own.append(sequence(len(group) + len(own) + 1, sample, turns, origin))
        group += own
    rng.shuffle(group)
    return group


def paths(group: list[Rollout]) -> list[list[tuple[int, int]]]:
    """For each leaf the tokens (rollout, index) from the first prompt to its end."""
    place = {rollout.request_id: index for index, rollout in enumerate(group)}

    def up_to(index: int, end: int) -> list[tuple[int, int]]:
        rollout = group[index]
        before = [] if rollout.forked_from is None else up_to(place[rollout.forked_from[0]], rollout.forked_from[1])
        return before + [(index, token) for token in range(end)]

    return [up_to(index, len(rollout.token_ids)) for index, rollout in enumerate(group)]


def restated(kind: str, group: list[Rollout]) -> list[list[float]]:
    every = paths(group)
    returns = []
    for leaf, path in enumerate(every):
        last: dict[int, int] = {}
        for index, token in path:
            last[index] = token + 1
        # Rollouts of which the path contains no token can still have empty turns at their beginning.
        index = leaf
        while group[index].forked_from is not None:
            parent = next(i for i, r in enumerate(group) if r.request_id == group[index].forked_from[0])
            last.setdefault(parent, 0)
            index = parent
        last.setdefault(leaf, 0)
        returns.append(sum(t.reward for i, end in last.items() for t in group[i].turns if t.drawn and t.end <= end))
    mean, deviation = fmean(returns), pstdev(returns)
    out = []
    for index, rollout in enumerate(group):
        row = []
        for token, drawn in enumerate(rollout.drawn):
            if not drawn:
                row.append(0.0)
                continue
            below = [leaf for leaf, path in enumerate(every) if (index, token) in path]
            value = fmean(returns[leaf] for leaf in below)
            if kind == "rloo":
                others = [r for leaf, r in enumerate(returns) if leaf not in below]
                row.append(len(below) * (value - fmean(others)) if others else 0.0)
            elif kind == "treerl":
                path = every[below[0]]
                before = path[: path.index((index, token))]
                larger = [{leaf for leaf, other in enumerate(every) if place in other} for place in reversed(before)]
                # A new node begins where a branch leaves, also if the same leaves are below.
                boundary = _parent(group, every, index, token)
                parent = mean if boundary is None else fmean(returns[leaf] for leaf in boundary)
                assert all(set(below) <= each for each in larger)
                row.append(((value - mean) + (value - parent)) / math.sqrt(len(below)))
            elif kind == "vineppo":
                row.append(restated_value(group, returns, index, token))
            elif kind == "tree_grpo":
                normal = [(r - mean) / (deviation + 1e-6) for r in returns]
                tree = [n for n, other in zip(normal, group, strict=True) if other.sample == rollout.sample]
                row.append(fmean((normal[leaf] - fmean(tree)) / (pstdev(tree) + 1e-6) for leaf in below))
            else:
                found = []
                for leaf in below:
                    sets = {frozenset(range(len(group)))} | {
                        frozenset(other for other, path in enumerate(every) if place in path) for place in every[leaf]
                    }
                    sets = {each for each in sets if len(each) > 1}
                    terms = [len(each) * (returns[leaf] - fmean(returns[other] for other in each)) for each in sets]
                    found.append(sum(terms) / sum(map(len, sets)) if sets else 0.0)
                row.append(fmean(found))
        out.append(row)
    return out


def restated_value(group: list[Rollout], returns: list[float], index: int, token: int) -> float:
    """The value of the next place at which a branch leaves, less the value of the last one."""
    me = group[index]
    if me.forked_from is not None:
        return 0.0
    continued: dict[int, list[float]] = {0: [], len(me.token_ids): [returns[index]]}
    for other, value in zip(group, returns, strict=True):
        if other.forked_from is None and other.sample != me.sample:
            continued[0].append(value)
        if other.forked_from and other.forked_from[0] == me.request_id and other.forked_from[1] < len(me.token_ids):
            continued.setdefault(other.forked_from[1], []).append(value)
    before = continued[max(place for place in continued if place <= token)]
    after = continued[min(place for place in continued if place > token)]
    return fmean(after) - (fmean(before) if before else 0.0)


def _parent(group, every, index, token):
    """The leaves below the node before the node of a token: nodes end where a branch leaves and at the end."""
    cuts = {r.forked_from[1] for r in group if r.forked_from and r.forked_from[0] == group[index].request_id}
    begin = max((cut for cut in cuts if 0 < cut <= token), default=0)
    leaf = next(leaf for leaf, path in enumerate(every) if (index, token) in path)
    path = every[leaf]
    place = path.index((index, begin))
    if place == 0:
        return None
    return [leaf for leaf, other in enumerate(every) if path[place - 1] in other]


@pytest.mark.parametrize("kind", KINDS)
def test_random_trees_get_the_formulas(kind):
    rng = np.random.default_rng(0)
    for _ in range(60):
        groups = [random_group(rng), random_group(rng)]
        found = inflight.tree_advantages(kind)(groups)
        expected = [row for group in groups for row in restated(kind, group)]
        for column, row in zip(found, expected, strict=True):
            assert column.dtype == np.float32
            assert column.tolist() == pytest.approx(row, rel=1e-4, abs=1e-5)


def test_rloo_is_the_gradient_of_the_leaves_by_enumeration():
    """Two episodes: a first token, then two branches of one token each. Every outcome is weighed by its chance."""
    p, q = 0.3, {0: 0.6, 1: 0.2}
    reward = {(0, 0): 0.2, (0, 1): 1.0, (1, 0): -0.5, (1, 1): 2.0}

    def chance(a, b):
        return (p if a else 1 - p) * (q[a] if b else 1 - q[a])

    exact = np.zeros(3)
    for a, b in product((0, 1), repeat=2):
        slope = np.array([a - p, (b - q[0]) * (a == 0), (b - q[1]) * (a == 1)])
        exact += 4 * chance(a, b) * reward[a, b] * slope
    expected = {kind: np.zeros(3) for kind in ("rloo", "treerl")}
    for outcome in product((0, 1), repeat=6):
        group, weight, slopes = [], 1.0, []
        for sample, (a, b, c) in enumerate((outcome[:3], outcome[3:])):
            weight *= (p if a else 1 - p) * math.prod(q[a] if x else 1 - q[a] for x in (b, c))
            first = sequence(2 * sample, sample, [(1, True, None), (1, True, reward[a, b])])
            group += [first, sequence(2 * sample + 1, sample, [(1, True, reward[a, c])], (2 * sample, 1))]
            of = [np.array([0, (x - q[0]) * (a == 0), (x - q[1]) * (a == 1)]) for x in (b, c)]
            slopes += [[np.array([a - p, 0, 0]), of[0]], [of[1]]]
        for kind, total in expected.items():
            for column, of_tokens in zip(inflight.tree_advantages(kind)([group]), slopes, strict=True):
                for value, slope in zip(column.tolist(), of_tokens, strict=True):
                    total += weight * value * slope
    assert expected["rloo"] == pytest.approx(exact, rel=1e-5)
    assert expected["treerl"] != pytest.approx(exact, rel=1e-2)


def test_vineppo_is_the_gradient_of_the_first_sequences_by_enumeration():
    """Two episodes of two tokens. A branch after the first token estimates its value, and is not trained."""
    p, q = 0.3, {0: 0.6, 1: 0.2}
    reward = {(0, 0): 0.2, (0, 1): 1.0, (1, 0): -0.5, (1, 1): 2.0}
    exact, expected = np.zeros(3), np.zeros(3)
    for outcome in product((0, 1), repeat=6):
        weight, group, slopes = 1.0, [], []
        for sample, (a, b, c) in enumerate((outcome[:3], outcome[3:])):
            weight *= (p if a else 1 - p) * math.prod(q[a] if x else 1 - q[a] for x in (b, c))
            first = sequence(2 * sample, sample, [(1, True, None), (1, True, reward[a, b])])
            group += [first, sequence(2 * sample + 1, sample, [(1, True, reward[a, c])], (2 * sample, 1))]
            slopes.append([np.array([a - p, 0, 0]), np.array([0, (b - q[0]) * (a == 0), (b - q[1]) * (a == 1)])])
        columns = inflight.tree_advantages("vineppo")([group])
        assert columns[1].tolist() == columns[3].tolist() == [0.0]
        for first, column, of_tokens in zip(group[::2], columns[::2], slopes, strict=True):
            exact += weight * first.turns[1].reward * sum(of_tokens)
            expected += weight * sum(value * slope for value, slope in zip(column.tolist(), of_tokens, strict=True))
    assert expected == pytest.approx(exact, rel=1e-5)


def test_sparing_a_share_is_unbiased_by_enumeration():
    """Two episodes of two tokens. After a first token 0 they end, unless they are spared."""
    p, q, share = 0.3, {0: 0.6, 1: 0.2}, 0.25
    reward = {(0, 0): 0.2, (0, 1): 1.0, (1, 0): -0.5, (1, 1): 2.0}
    exact, expected, ended = np.zeros(3), np.zeros(3), np.zeros(3)
    for outcome in product((0, 1), repeat=6):
        chance, group, slopes = 1.0, [], []
        for sample, (a, b, spared) in enumerate((outcome[:3], outcome[3:])):
            chance *= (p if a else 1 - p) * (q[a] if b else 1 - q[a]) * (share if spared else 1 - share)
            weight = 1.0 if a else spared / share
            rollout = sequence(sample, sample, [(2, True, None)])
            value = reward[a, b] if weight else 7.0  # the reward of an ended episode has no effect
            group.append(replace(rollout, reward=value, metadata={"inflight.weight": weight}))
            slopes.append(np.array([a - p, (b - q[0]) * (a == 0), (b - q[1]) * (a == 1)]))
            exact += chance_of(outcome, p, q, share) * reward[a, b] * slopes[-1]
        for advantages, total in ((inflight.spared_advantages, expected), (resolve_advantages("rloo"), ended)):
            total += chance * sum(value * slope for value, slope in zip(advantages([group]), slopes, strict=True))
    assert expected == pytest.approx(exact, rel=1e-5)
    assert ended != pytest.approx(exact, rel=1e-1)


def chance_of(outcome, p, q, share):
    parts = [
        (p if a else 1 - p) * (q[a] if b else 1 - q[a]) * (share if u else 1 - share)
        for a, b, u in (outcome[:3], outcome[3:])
    ]
    return math.prod(parts)


def test_samples_without_branches_are_compared_as_a_group():
    group = [sequence(i, i, [(2, True, float(r)), (1, False, None)]) for i, r in enumerate((1, 0, 2))]
    found = inflight.tree_advantages("rloo")([group])
    assert [column.tolist() for column in found] == [[0, 0, 0], [-1.5, -1.5, 0], [1.5, 1.5, 0]]
    plain = [replace(rollout, turns=(), reward=float(i)) for i, rollout in enumerate(group)]
    assert [c.tolist() for c in inflight.tree_advantages("rloo")([plain])] == [[-1.5] * 3, [0.0] * 3, [1.5] * 3]
    with pytest.raises(ValueError, match="unknown tree advantages 'mcts'"):
        inflight.tree_advantages("mcts")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "vineppo"])  # which compares rewards that follow
@pytest.mark.parametrize("reward", [0.1, 0.7, -1 / 3])
def test_equal_returns_give_no_advantage_at_all(kind, reward):
    """An advantage by rounding would hide that the group is uniform."""
    group = [sequence(index, index, [(3, True, reward)]) for index in range(7)]
    group.append(sequence(7, 0, [(2, True, None), (1, True, reward)], forked_from=(0, 1)))
    group[-1].turns = (Turn(0, 2, True, 0.0), Turn(2, 3, True, reward))
    for column in inflight.tree_advantages(kind)([group]):
        assert not column.any()
