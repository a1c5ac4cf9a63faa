"""Optional columns of requests, computed in vLLM's worker from the distributions that tokens were drawn from.

vLLM's sampler passes these distributions to the function that gathers log-probabilities. In steps in which a request
has asked for columns, they are read there. S rows of a step, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch

from inflight.core.sampling import SamplingParams
from inflight.engine.loop.own_columns import ColumnFunction, compute_columns
from inflight.engine.loop.sampler import count_mask

ASKED = "inflight_columns"
"""The extra argument of vLLM's SamplingParams with the columns of a request."""
_ENTROPIES, _MASK = "entropies", "sampling_mask"

UNRECORDED = "vLLM's second model runner does not tell what it draws from; set VLLM_USE_V2_MODEL_RUNNER=0 for its first"

Columns = tuple[list[str], dict[str, torch.Tensor]]
"""vLLM's names of the requests of a step, and columns of `engine.loop.sampler.Samples.columns` for each, on the CPU."""


def asked(params: SamplingParams) -> list[str]:
    """Return the columns of a request that vLLM does not record itself."""
    built_in = {_ENTROPIES: params.return_entropy, _MASK: params.return_sampling_mask and params.filtered}
    return [name for name, wanted in built_in.items() if wanted] + list(params.columns)


def can_record(runner: Any) -> bool:
    """Return True if the sampler of a model runner of vLLM passes its distributions on. The sampler of vLLM's second
    model runner does not."""
    return hasattr(getattr(runner, "sampler", None), "gather_logprobs")


class ColumnRecorder:
    """Reads the samples of a model runner of vLLM."""

    def __init__(self, runner: Any, functions: Mapping[str, ColumnFunction]):
        """functions: custom columns, by name."""
        self._runner, self._functions = runner, functions
        self._columns: Columns | None = None
        gather = runner.sampler.gather_logprobs

        def gather_and_record(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
            self._record(logprobs, token_ids)
            return gather(logprobs, num_logprobs, token_ids)

        runner.sampler.gather_logprobs = gather_and_record

    def take(self) -> Columns | None:
        """Return the columns of the last step; None if no request asked for any."""
        columns, self._columns = self._columns, None
        return columns

    @torch.inference_mode()
    def _record(self, logprobs_SV: torch.Tensor, tokens_S: torch.Tensor) -> None:
        names = list(self._runner.input_batch.req_ids)
        wanted = [self._asked(name) for name in names]
        everything = {column for columns in wanted for column in columns}
        if not everything:
            self._columns = None
            return
        columns: dict[str, torch.Tensor] = {}
        if _ENTROPIES in everything:
            columns[_ENTROPIES] = torch.special.entr(logprobs_SV.float().exp()).sum(-1)  # in nats
        if _MASK in everything:
            rows_A = torch.tensor([i for i, own in enumerate(wanted) if _MASK in own], device=logprobs_SV.device)
            mask_AV = logprobs_SV[rows_A] > float("-inf")
            counts, mask_AV = count_mask(mask_AV, rows_A, num_rows=len(names))
            columns |= counts | {"mask_token_ids": mask_AV.nonzero()[:, 1]}
        own = {
            column: torch.tensor([i for i, own in enumerate(wanted) if column in own], device=logprobs_SV.device)
            for column in self._functions.keys() & everything
        }
        columns |= compute_columns(self._functions, own, logprobs_SV, tokens_S)
        self._columns = names, {name: column.cpu() for name, column in columns.items()}

    def _asked(self, name: str) -> list[str]:
        return (self._runner.requests[name].sampling_params.extra_args or {}).get(ASKED, [])
