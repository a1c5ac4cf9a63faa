"""Turns of an episode with given texts."""

import numpy as np

import inflight

CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b":2}}\n</tool_call><|im_end|>'


def scripted(tokenizer, *texts):
    """Return a stand-in for `Turns.draw` that draws these texts."""
    left = iter(texts)

    def of(draw):
        async def say(token_ids, params, place, *others):
            ids = np.array(tokenizer(next(left))["input_ids"], np.int32)
            zeros = np.zeros(len(ids), np.int64)
            return inflight.Rollout(
                request_id=0,
                group_id=place.group_id,
                sample=place.sample,
                params=params,
                metadata={},
                prompt_token_ids=np.array(token_ids, np.int32),
                token_ids=ids,
                logprobs=zeros.astype(np.float32),
                weight_versions=zeros,
                sampled_at_ns=zeros,
                finish_reason="stop",
            )

        return say

    return of
