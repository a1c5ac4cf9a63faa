"""A rollout function over token ids, and the rollouts of its episodes."""

import inflight

PARAMS = inflight.SamplingParams(n=4, max_tokens=5, ignore_eos=True)
TOOL = [7, 8, 9]


async def three_turns(session, row):
    """Two outputs of a tool between three drawn turns; a reward for each turn."""
    tokens = list(row)
    for turn in range(3):
        reply = await session.complete(tokens)
        session.reward(turn + 0.5)
        tokens += [*reply.token_ids, *TOOL]
    return float(session.sample)


def collect(engine, episodes, rows, params=PARAMS):
    with episodes:
        return engine.stream.collect(episodes.submit(rows, params, train=False), timeout_s=60)
