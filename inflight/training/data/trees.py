"""Advantages of episodes that branch: the token sequences of a sample form trees by `Rollout.forked_from`.

A leaf is the end of a token sequence. Its return is the sum of the rewards of the turns on its path from the first
prompt. L(t) is the set of leaves whose paths contain token t, and V(t) the mean of their returns. Every drawn token is
in one sequence, so that it is trained once, also if many leaves are below it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, pstdev
from typing import NamedTuple

import numpy as np

from inflight.core.arguments import named
from inflight.core.rollout import Rollout, Turn
from inflight.training.data.advantages import Advantages, per_group


class _Node(NamedTuple):
    """A range of one token sequence whose tokens have the same leaves below them."""

    rollout: int
    """Index of the rollout in its group."""
    begin: int
    end: int
    leaves: list[int]
    """Indices of the rollouts whose ends are below."""


@named()
def tree_advantages(kind: str = "rloo") -> Advantages:
    """Return a function for `advantages=` that credits the tokens of a tree, f32[tokens] for each rollout. L(t) is the
    set of leaves below token t, n(t) their number, and V(t) the mean of their returns.

    "rloo": n(t) · (V(t) − mean return of the group's leaves that are not below t). Its expectation is the gradient of
    the sum of the leaves' returns, if the places of branches do not depend on tokens that are drawn after them. 0 for a
    token with all leaves below it.
    "treerl": ((V(t) − V(root)) + (V(t) − V(parent of the node of t))) / √n(t) (TreeRL, arXiv 2506.11902); the root has
    all leaves of the group.
    "tree_grpo": of a leaf, its return normalised over the group, and then over its tree, the leaves of its sample
    (Tree-GRPO, arXiv 2509.21240); a token gets the mean over L(t).
    "treepo": of a leaf, the mean of (return − mean return of G), weighted by the size of G, over the sets G of at least
    two leaves below its ancestors and below the root (TreePO, arXiv 2508.17445, without its normalisation over the
    batch); a token gets the mean over L(t).
    "vineppo": only the first sequence of a sample is trained. Branches are extra continuations that estimate values:
    V(c) is the mean return of the branches that leave the first sequence at token c, and at its end its own return.
    At c = 0 the first sequences of the other samples count, too. The tokens between two such places get V(after them)
    − V(before them) (VinePPO, arXiv 2410.01679). Its expectation is the gradient of the first sequence's return, if the
    places do not depend on tokens that are drawn after them.
    Raises ValueError for an unknown kind.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown tree advantages {kind!r}; choose {', '.join(_KINDS)}")
    value_of = _KINDS[kind]

    @per_group
    def advantages(groups: Sequence[Sequence[Rollout]]) -> list[np.ndarray]:
        return [column for group in groups for column in _of_group(group, value_of)]

    return advantages


def _of_group(group: Sequence[Rollout], value_of: "Value") -> list[np.ndarray]:
    columns = [np.zeros(len(rollout.token_ids), np.float32) for rollout in group]
    origins = [_origin(group, index) for index in range(len(group))]
    paths = _paths(group, origins)
    returns = {leaf: _return(group, path) for leaf, path in enumerate(paths)}
    if len(set(returns.values())) == 1 and value_of is not _vineppo:  # Rounding would leave differences.
        return columns
    forest = _Forest(_nodes(paths), returns, [rollout.sample for rollout in group], origins)
    for node in forest.nodes:
        columns[node.rollout][node.begin : node.end] = value_of(node, forest)
    for rollout, column in zip(group, columns, strict=True):
        column[~rollout.drawn] = 0
    return columns


def _paths(group: Sequence[Rollout], origins: "Origins") -> list[dict[int, int]]:
    """Return for each leaf the rollouts on its path, itself first, each with the number of its tokens on the path."""
    paths = [{index: len(rollout.token_ids)} for index, rollout in enumerate(group)]
    for index, path in enumerate(paths):
        origin = origins[index]
        while origin is not None and origin[0] not in path:
            path[origin[0]] = origin[1]
            origin = origins[origin[0]]
    return paths


def _nodes(paths: Sequence[dict[int, int]]) -> list[_Node]:
    """Return the nodes of all trees of a group."""
    nodes: list[_Node] = []
    for rollout in range(len(paths)):
        ends = sorted({path.get(rollout, 0) for path in paths} | {0})
        for begin, end in pairwise(ends):
            leaves = [leaf for leaf, path in enumerate(paths) if path.get(rollout, 0) >= end]
            nodes.append(_Node(rollout, begin, end, leaves))
    return nodes


def _return(group: Sequence[Rollout], path: dict[int, int]) -> float:
    """Return the return of a leaf. A turn counts if the path contains all of it."""
    total = 0.0
    for index, end in path.items():
        rollout = group[index]
        turns = rollout.turns or (Turn(0, len(rollout.token_ids), True, rollout.reward),)
        total += sum(turn.reward or 0.0 for turn in turns if turn.drawn and turn.end <= end)
    return total


def _origin(group: Sequence[Rollout], index: int) -> tuple[int, int] | None:
    """Return the index of the rollout that a rollout is forked from, and the number of its tokens; None for a root."""
    rollout = group[index]
    if rollout.forked_from is None:
        return None
    request_id, count = rollout.forked_from
    places = (i for i, r in enumerate(group) if (r.sample, r.request_id) == (rollout.sample, request_id))
    place = next(places, None)
    return None if place is None else (place, count)


@dataclass(frozen=True, slots=True)
class _Forest:
    """The trees of a group."""

    nodes: Sequence[_Node]
    returns: dict[int, float]
    """Maps the leaves to their returns."""
    samples: Sequence[int]
    """The sample of each leaf; each sample is a tree."""
    origins: "Origins"
    """For each sequence: the index of the sequence that it branches from, and the token where it does; None for the
    first sequence of a sample."""

    def mean(self, leaves: Iterable[int]) -> float:
        """Return the mean return of some leaves."""
        return fmean(self.returns[leaf] for leaf in leaves)


Origins = Sequence[tuple[int, int] | None]
Value = Callable[[_Node, _Forest], float]
"""A function of a node and the trees of its group."""


def _rloo(node: _Node, forest: _Forest) -> float:
    others = [leaf for leaf in forest.returns if leaf not in node.leaves]
    return len(node.leaves) * (forest.mean(node.leaves) - forest.mean(others)) if others else 0.0


def _treerl(node: _Node, forest: _Forest) -> float:
    root, value = forest.mean(forest.returns), forest.mean(node.leaves)
    above = [n.leaves for n in forest.nodes if set(n.leaves) > set(node.leaves)]  # Of its ancestors.
    parent = forest.mean(min(above, key=len)) if above else root
    return ((value - root) + (value - parent)) / sqrt(len(node.leaves))


def _tree_grpo(node: _Node, forest: _Forest) -> float:
    of_group, sample = _normalised(forest.returns), forest.samples[node.leaves[0]]
    of_tree = _normalised({leaf: value for leaf, value in of_group.items() if forest.samples[leaf] == sample})
    return fmean(of_tree[leaf] for leaf in node.leaves)


def _normalised(values: dict[int, float]) -> dict[int, float]:
    mean, deviation = fmean(values.values()), pstdev(values.values())
    return {leaf: (value - mean) / (deviation + 1e-6) for leaf, value in values.items()}


def _treepo(node: _Node, forest: _Forest) -> float:
    def of_leaf(leaf: int) -> float:
        sets = {frozenset(forest.returns), *(frozenset(n.leaves) for n in forest.nodes if leaf in n.leaves)}
        sets = {each for each in sets if len(each) > 1}
        terms = [len(each) * (forest.returns[leaf] - forest.mean(each)) for each in sets]
        return sum(terms) / sum(map(len, sets)) if sets else 0.0

    return fmean(of_leaf(leaf) for leaf in node.leaves)


def _vineppo(node: _Node, forest: _Forest) -> float:
    if forest.origins[node.rollout] is not None:
        return 0.0
    is_last = not any(n.rollout == node.rollout and n.begin >= node.end for n in forest.nodes)
    after = forest.returns[node.rollout] if is_last else _value_at(node.rollout, node.end, forest)
    return after - _value_at(node.rollout, node.begin, forest)


def _value_at(rollout: int, token: int, forest: _Forest) -> float:
    """Return the mean return of the continuations from a place of a first sequence, 0 if there are none."""
    found = [leaf for leaf, origin in enumerate(forest.origins) if origin == (rollout, token)]
    if token == 0:
        sample = forest.samples[rollout]
        found += [i for i, o in enumerate(forest.origins) if o is None and forest.samples[i] != sample]
    return forest.mean(found) if found else 0.0


_KINDS: dict[str, Value] = {
    "rloo": _rloo,
    "treerl": _treerl,
    "tree_grpo": _tree_grpo,
    "treepo": _treepo,
    "vineppo": _vineppo,
}
