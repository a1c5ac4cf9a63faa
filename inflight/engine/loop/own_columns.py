"""Custom per-token columns: functions that `EngineOptions.columns` names, called for sampled tokens.

A request can ask for the loaded columns, by name. S tokens, V vocabulary.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from inflight.core.by_name import load_by_name
from inflight.core.columns import NUMBERS, own_column_name
from inflight.core.errors import TokenColumnError

logger = logging.getLogger("inflight.engine")

ColumnFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps log-probabilities f32[S, V], −inf for tokens that were filtered out, and tokens i64[S] to numbers [S]."""
_failed: set[str] = set()
"""Columns of which a failure was logged."""
_DTYPES = tuple(torch.from_numpy(np.empty(0, dtype)).dtype for dtype in NUMBERS)


def load_columns(paths: Sequence[str], *, vocab_size: int, device: torch.device) -> dict[str, ColumnFunction]:
    """Import the functions that `EngineOptions.columns` names and try each on two tokens. Raises TokenColumnError."""
    functions = {own_column_name(path): _load(path) for path in paths}
    uniform_SV = torch.full((2, vocab_size), 1 / vocab_size, device=device).log()
    for name, function in functions.items():
        _compute(name, function, uniform_SV, torch.arange(2, device=device) % vocab_size)
    return functions


def compute_columns(
    functions: Mapping[str, ColumnFunction],
    asked: Mapping[str, torch.Tensor | None],
    logprobs_MV: torch.Tensor,
    tokens_M: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the columns [M] of tokens that were sampled from these log-probabilities. asked: maps the names of columns
    to the rows i64[S] that asked for them, None for all rows. Functions see only these rows, and other rows are 0.

    If a function fails, its column is left out. The requests that asked for it then end as "error", and no others."""
    columns: dict[str, torch.Tensor] = {}
    for name, rows_S in asked.items():
        logprobs_SV, tokens_S = (logprobs_MV, tokens_M) if rows_S is None else (logprobs_MV[rows_S], tokens_M[rows_S])
        try:
            column_S = _compute(name, functions[name], logprobs_SV, tokens_S)
        except TokenColumnError:
            if name not in _failed:
                _failed.add(name)
                logger.exception("requests that asked for column %s end as errors; later failures are not logged", name)
            continue
        columns[name] = (
            column_S if rows_S is None else column_S.new_zeros(len(tokens_M)).index_copy_(0, rows_S, column_S)
        )
    return columns


def _compute(name: str, function: ColumnFunction, logprobs_SV: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    """Return a column [S]. Raises TokenColumnError."""
    try:
        column = function(logprobs_SV, tokens_S)
    except Exception as error:
        raise TokenColumnError(f"the function of column {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(column, torch.Tensor) or column.shape != tokens_S.shape or column.dtype not in _DTYPES:
        got = f"{column.dtype}{list(column.shape)}" if isinstance(column, torch.Tensor) else type(column).__name__
        raise TokenColumnError(
            f"the function of column {name} returned {got}; it must return a tensor [{len(tokens_S)}], one number "
            f"per token, of dtype {', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}"
        )
    return column.to(tokens_S.device)


def _load(path: str) -> ColumnFunction:
    where, _, name = path.rpartition(":")
    try:
        function = load_by_name(path)
    except Exception as error:
        raise TokenColumnError(
            f"column {name} cannot be imported from {where} ({type(error).__name__}: {error}); the engine finds the "
            "modules that its launcher finds, but for those in the working directory, which it takes by path"
        ) from error
    if not callable(function):
        raise TokenColumnError(f"{path} is no function but {type(function).__name__}")
    return cast(ColumnFunction, function)
