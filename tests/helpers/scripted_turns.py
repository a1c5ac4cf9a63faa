"""Turns of an episode with given texts."""

from dataclasses import replace

import numpy as np

from inflight.training.data.batch import given_rollout

CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b":2}}\n</tool_call><|im_end|>'


def scripted(tokenizer, *texts):
    """Return a stand-in for `Turns.draw` that draws these texts."""
    left = iter(texts)

    def of(draw):
        async def say(token_ids, params, place, *others):
            ids = np.array(tokenizer(next(left))["input_ids"], np.int32)
            rollout = given_rollout(token_ids, ids, request_id=0, group_id=place.group_id, sample=place.sample)
            return replace(rollout, params=params)

        return say

    return of
