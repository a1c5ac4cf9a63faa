"""Per-token columns: what a frame carries for each token beside its id and its log-probability.

An entry of COLUMNS is all that the wire and the assembler need to know of a column: its dtypes and dimensions are
checked before a frame's bytes are read, `asked_by` says which requests get it, and a rollout holds it under its name in
`Rollout.columns`. A column that has no entry is a user's own (`EngineOptions.columns`): one number per token, for the
requests that name it in `SamplingParams.columns`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from inflight.core.sampling import MAX_TOP_LOGPROBS, SamplingParams

TOKENS = "tokens"
"""The dimension of what has one row for each token that the pass sampled."""
MASK_OFFSETS = "mask offsets"
"""The dimension that has one entry more than there are tokens."""
TOP = "top"
SCORED_TOP = "scored top"
MOST = {TOP: MAX_TOP_LOGPROBS, SCORED_TOP: MAX_TOP_LOGPROBS}
"""Maps dimensions to the largest size that they can have."""
NUMBERS = ("<f4", "<f8", "<i4", "<i8", "<u1", "<b1")
"""Dtypes that a user's own column may have."""
_OWN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """How a column travels and who gets it."""

    dtypes: tuple[str, ...]
    """Little-endian; a column arrives in one of them."""
    dims: tuple[str, ...]
    """Names of its dimensions. Two columns of a frame that share a name must agree in that size."""
    asked_by: Callable[[SamplingParams], int] = lambda params: 0
    """How many values per token a request gets in its rollout under this name; 0: the rollout does not have it."""
    needs: tuple[str, ...] = ()
    """Columns without which it cannot be read."""


_ROUTED = ("routed_request_ids", "routed_positions", "routed_experts")
SCORES = ("logprobs", "ranks", "top_token_ids", "top_logprobs")
"""What is told of a scored token of a prompt, as `PromptScores` names it; a frame has each as scored_…"""
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
"""Columns that every frame begins with."""
FROM_HEADER = ("weight_versions", "sampled_at_ns")
"""Columns of a rollout that all tokens of a frame share; no column of a frame is called that."""
_OWN = TokenColumn(NUMBERS, (TOKENS,))


def find_column(name: str) -> TokenColumn | None:
    """The column of this name, built in or a user's own; None if no column can be called that."""
    return COLUMNS.get(name) or (_OWN if _OWN_NAME.fullmatch(name) and name not in FROM_HEADER else None)


def asked_columns(params: SamplingParams) -> list[str]:
    """Names of the columns that a request's rollouts have in `Rollout.columns`."""
    built_in = [name for name, column in COLUMNS.items() if column.asked_by(params)]
    return built_in + [name for name in params.columns if name not in COLUMNS]


def own_column_name(path: str) -> str:
    """The name of the column that "module:function" or "file.py:function" computes. Raises ValueError."""
    where, colon, name = path.rpartition(":")
    if not (where and colon) or find_column(name) is not _OWN:
        raise ValueError(
            f'a column of one\'s own is given as "module:function" or "path/to/file.py:function", where the function '
            f"has the column's name, which is none of {', '.join((*COLUMNS, *FROM_HEADER))}; got {path!r}"
        )
    return name
