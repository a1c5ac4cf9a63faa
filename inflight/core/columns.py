"""Per-token columns: the values that a frame carries for each token in addition to its id and log-probability.

An entry of COLUMNS describes a column completely. Its dtypes and dimensions are checked before a frame's bytes are
read; `asked_by` selects the requests that get it; a rollout stores it under its name in `Rollout.columns`. A column
without an entry is a custom one (`EngineOptions.columns`): one number per token, for the requests that name it in
`SamplingParams.columns`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from inflight.core.sampling import MAX_TOP_LOGPROBS, SamplingParams

TOKENS = "tokens"
"""Dimension with one row per token that the pass sampled."""
MASK_OFFSETS = "mask offsets"
"""Dimension with one entry per token, and one more."""
TOP = "top"
SCORED_TOP = "scored top"
MOST = {TOP: MAX_TOP_LOGPROBS, SCORED_TOP: MAX_TOP_LOGPROBS}
"""Maps dimensions to their largest size."""
NUMBERS = ("<f4", "<f8", "<i4", "<i8", "<u1", "<b1")
"""Dtypes of custom columns."""
_OWN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """Wire format of a column, and the requests that get it."""

    dtypes: tuple[str, ...]
    """Possible dtypes, little-endian."""
    dims: tuple[str, ...]
    """Names of its dimensions. Dimensions of the same name must have the same size in all columns of a frame."""
    asked_by: Callable[[SamplingParams], int] = lambda params: 0
    """Number of values per token in a request's rollout; 0: the rollout does not have the column."""
    needs: tuple[str, ...] = ()
    """Columns that must be in the same frame."""


_ROUTED = ("routed_request_ids", "routed_positions", "routed_experts")
SCORES = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
"""Values per scored prompt token, by their names in `PromptScores`. Their columns in a frame are called scored_…"""
_SCORED = ("scored_request_ids", "scored_positions", *(f"scored_{name}" for name in SCORES))

COLUMNS = {
    "request_ids": TokenColumn(("<u8",), (TOKENS,)),
    "token_ids": TokenColumn(("<i4",), (TOKENS,)),
    "logprobs": TokenColumn(("<f4",), (TOKENS,)),
    "entropies": TokenColumn(("<f4",), (TOKENS,), lambda params: params.return_entropy),
    "top_token_ids": TokenColumn(("<i4",), (TOKENS, TOP), lambda params: params.top_logprobs, ("top_logprobs",)),
    "top_logprobs": TokenColumn(("<f4",), (TOKENS, TOP), lambda params: params.top_logprobs, ("top_token_ids",)),
    "mask_offsets": TokenColumn(("<i8",), (MASK_OFFSETS,), needs=("mask_token_ids",)),
    "mask_token_ids": TokenColumn(("<i4",), ("mask token ids",), needs=("mask_offsets",)),
    "mask_cut_from": TokenColumn(("<i4",), (TOKENS,), needs=("mask_offsets",)),
    "routed_request_ids": TokenColumn(("<u8",), ("computed tokens",), needs=_ROUTED),
    "routed_positions": TokenColumn(("<i4",), ("computed tokens",), needs=_ROUTED),
    "routed_experts": TokenColumn(("<u1", "<u2"), ("computed tokens", "layers", "experts"), needs=_ROUTED),
    "scored_request_ids": TokenColumn(("<u8",), ("scored tokens",), needs=_SCORED),
    "scored_positions": TokenColumn(("<i4",), ("scored tokens",), needs=_SCORED),
    "scored_logprobs": TokenColumn(("<f4",), ("scored tokens",), needs=_SCORED),
    "scored_ranks": TokenColumn(("<i4",), ("scored tokens",), needs=_SCORED),
    "scored_top_token_ids": TokenColumn(("<i4",), ("scored tokens", SCORED_TOP), needs=_SCORED),
    "scored_top_logprobs": TokenColumn(("<f4",), ("scored tokens", SCORED_TOP), needs=_SCORED),
}
REQUIRED = tuple(COLUMNS)[:3]
"""The first columns of every frame."""
FROM_HEADER = ("weight_versions", "sampled_at_ns")
"""Columns of a rollout that are made from the header of a frame. No column of a frame can have these names."""
_OWN = TokenColumn(NUMBERS, (TOKENS,))


def find_column(name: str) -> TokenColumn | None:
    """Return the column of this name, built in or custom; None if the name is not allowed."""
    return COLUMNS.get(name) or (_OWN if _OWN_NAME.fullmatch(name) and name not in FROM_HEADER else None)


def asked_columns(params: SamplingParams) -> list[str]:
    """Return the names of the columns in the `Rollout.columns` of a request's rollouts."""
    built_in = [name for name, column in COLUMNS.items() if column.asked_by(params)]
    return built_in + [name for name in params.columns if name not in COLUMNS]


def own_column_name(path: str) -> str:
    """Return the name of the column that "module:function" or "file.py:function" computes. Raises ValueError."""
    where, colon, name = path.rpartition(":")
    if not (where and colon) or find_column(name) is not _OWN:
        raise ValueError(
            f'a column of one\'s own is given as "module:function" or "path/to/file.py:function", where the function '
            f"has the column's name, which is none of {', '.join((*COLUMNS, *FROM_HEADER))}; got {path!r}"
        )
    return name
