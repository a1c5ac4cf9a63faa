"""An engine with chunked, grouped, forked, cancelled and preempted sequences."""

from full_forward import PARAMS, ragged_prompts
from kv_blocks import check_blocks

from inflight.core.messages import Prompt
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.stream.assembler import Assembler


def live(engine: Engine) -> list[Rollout]:
    """Draw rollouts: prompts arrive in groups and alone, in chunks and again, some are forked at their last token and
    before it, some are cancelled, and others get their rows."""
    assembler, rollouts = Assembler(), []
    again = Prompt([(7 * i) % 190 for i in range(40)], SamplingParams(max_tokens=9, ignore_eos=True, seed=5, n=2))
    prompts = [*ragged_prompts(10, PARAMS), again, *ragged_prompts(6, PARAMS, seed=1), again]
    step = 0
    while prompts or engine.has_work:
        if prompts and step % 3 == 0:
            engine.requests.submit([prompts.pop(0)])
        if step % 8 == 5 and (unfinished := [s for s in engine.requests.unfinished.values() if s.tokens]):
            parent = unfinished[step % len(unfinished)]
            at = None if step % 16 == 5 else len(parent.tokens) // 2
            engine.requests.fork(parent.request_id, at, SamplingParams(max_tokens=8, seed=step, n=2, ignore_eos=True))
        if step % 11 == 10 and engine.requests.unfinished:
            engine.requests.cancel([], [next(iter(engine.requests.unfinished))])
        if (frame := engine.step()) is not None:
            rollouts += [r for group in assembler.add(frame) for r in group]
        check_blocks(engine.cache, [s.holding for s in engine.requests.unfinished.values()])
        step += 1
    assert engine.cache.num_used_blocks == 0
    assert {"length", "cancelled"} == {r.finish_reason for r in rollouts}
    assert len(rollouts) > 40
    return rollouts
