"""The parameters of an RMSNorm."""

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    weight: torch.Tensor
    """[D] of any float dtype."""
    eps: float
    offset: float = 0.0
    """1 in Gemma, 0 in OLMo 2 and gpt-oss."""
    cast_first: bool = True
    """True if n is rounded to the dtype of x before the product too, as in Llama and Qwen."""
