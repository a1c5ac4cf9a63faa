"""Indexers choose `index_topk` keys for each query of sparse attention (DeepSeek V3.2, GLM-5).

An indexer chooses all keys of a sequence that is not longer than `index_topk`. The engine and packed training keep to
this length (`lengths.py`), so that their attention needs no choice. They pass a note in place of a mask (`masks.py`),
and for a note `NoChoice` computes nothing.
"""

import inspect
from typing import Any

import torch
from torch import nn

from inflight.model_checks.lengths import chooses_keys


def sparse_attention(model: Any) -> list[nn.Module]:
    """Return the attention modules that choose keys. Their `indexer` is None if they use an earlier layer's choice. The
    list is empty if the configuration does not set the length up to which all keys are chosen."""
    if not chooses_keys(model.config.get_text_config()):
        return []
    return [module for module in model.modules() if hasattr(module, "indexer") and hasattr(module, "expand_kv")]


def indexers(model: nn.Module) -> list[nn.Module]:
    """Return the indexers of a model."""
    found: list[Any] = [module.indexer for module in sparse_attention(model)]
    return [indexer for indexer in found if indexer is not None]


class NoChoice:
    """The forward pass of an indexer, and of its deep copies, that returns i32[B, T, 0] if its mask is a note."""

    def __init__(self, indexer: nn.Module):
        """Raises ValueError if the indexer takes no `attention_mask`."""
        self._indexer, self._replaced = indexer, vars(indexer).get("forward")
        self._own = self._replaced or type(indexer).forward.__get__(indexer)
        self._place = list(inspect.signature(self._own).parameters).index("attention_mask")

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        mask = options["attention_mask"] if "attention_mask" in options else args[self._place - 1]
        if mask.dtype == torch.int64:
            return hidden_states.new_empty((*hidden_states.shape[:2], 0), dtype=torch.int32)
        return self._own(hidden_states, *args, **options)

    @classmethod
    def begin(cls, model: nn.Module) -> None:
        """Give every indexer of a model this forward pass, unless it has it."""
        for indexer in indexers(model):
            if not isinstance(vars(indexer).get("forward"), cls):
                indexer.forward = cls(indexer)

    @classmethod
    def end(cls, model: nn.Module) -> None:
        """Restore the indexers' own forward pass."""
        for indexer in indexers(model):
            if isinstance(ours := vars(indexer).get("forward"), cls):
                del indexer.forward
                if ours._replaced is not None:
                    indexer.forward = ours._replaced
