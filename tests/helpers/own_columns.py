"""Per-token columns of a user's own, as the tests of them use them."""

import torch


def margin(logprobs_SV: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    """f32[S]: by how much the likeliest token is likelier than the second."""
    best_S2 = logprobs_SV.exp().topk(2).values
    return best_S2[:, 0] - best_S2[:, 1]


def rank(logprobs_SV: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    """i64[S]: how many tokens are likelier than the sampled one."""
    return (logprobs_SV > logprobs_SV.gather(1, tokens_S[:, None])).sum(-1)


def whole_rows(logprobs_SV: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    return logprobs_SV


def needs_two(logprobs_SV: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    if (logprobs_SV.isfinite().sum(-1) < 2).any():
        raise ValueError("a row with one token")
    return logprobs_SV[:, 0]


def broken(logprobs_SV: torch.Tensor, tokens_S: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("no second token")
