"""Which sequences go into which micro-batch."""

from collections.abc import Sequence

QUADRATIC = 1 / 8192
"""Attention's share of the cost of a sequence of n tokens: n + n² · this. Linear work is about 24 h² operations per
token and layer, attention's 2 h n forward, so that they meet at n = 12 h: some 8,000 to 12,000 tokens where h is 700 to
1,000."""


def partition(lengths: Sequence[int], groups: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put sequences into bins of at most `max_tokens` tokens each, as few and as alike in cost as a greedy choice makes
    them.

    Groups that fit into a bin stay whole. The dearest group is placed first, each in the cheapest bin that has room
    (longest processing time first, Graham 1969). Raises ValueError if a sequence fits into no bin.
    """
    longest = max(lengths)
    if longest > max_tokens:
        raise ValueError(f"a sequence has {longest} tokens and max_tokens is {max_tokens}; allow at least {longest}")
    units: dict[object, list[int]] = {}
    for sequence, group in enumerate(groups):
        units.setdefault(group, []).append(sequence)
    whole = [u for u in units.values() if sum(lengths[s] for s in u) <= max_tokens]
    split = [[s] for u in units.values() if sum(lengths[s] for s in u) > max_tokens for s in u]
    ordered = sorted(whole + split, key=lambda unit: -_cost(unit, lengths))
    num_bins = max(1, -(-sum(lengths) // max_tokens))
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    costs, tokens = [0.0] * num_bins, [0] * num_bins
    for unit in ordered:
        size = sum(lengths[s] for s in unit)
        room = [b for b in range(len(bins)) if tokens[b] + size <= max_tokens]
        if not room:
            bins.append([])
            costs.append(0.0)
            tokens.append(0)
            room = [len(bins) - 1]
        best = min(room, key=costs.__getitem__)
        bins[best] += unit
        costs[best] += _cost(unit, lengths)
        tokens[best] += size
    return [sorted(chosen) for chosen in bins if chosen]


def _cost(unit: Sequence[int], lengths: Sequence[int]) -> float:
    return sum(lengths[s] + lengths[s] ** 2 * QUADRATIC for s in unit)
