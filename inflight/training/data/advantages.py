"""Group-relative advantages (Shao et al., DeepSeekMath, arXiv 2402.03300, §4.1)."""

import math
from collections.abc import Callable, Sequence

import numpy as np

Advantages = Callable[[Sequence[Sequence[float | None]]], Sequence[float]]
"""A function of the rewards of each group that returns an advantage for every sample, groups concatenated."""


def group_advantages(
    rewards: Sequence[Sequence[float | None]], *, scale: bool = True, ddof: int = 0, eps: float = 1e-4
) -> list[float]:
    """(r − mean of its group) / (standard deviation of its group + eps), for every sample, groups concatenated.

    scale: False leaves the division out (Dr. GRPO, arXiv 2503.20783). ddof: the standard deviation divides by n − ddof.
    0, that of the samples themselves, as the paper writes it; 1, the estimate for all samples that could be drawn, is
    what TRL, verl, slime and SkyRL take: their advantages are √((n − 1) / n) times these, 0.71 for n = 2 and 0.94 for
    n = 8. A group of equal rewards, or of one sample, gets 0.

    Raises ValueError for a reward that is None or not finite: leave such samples out before.
    """
    advantages: list[float] = []
    for index, group in enumerate(rewards):
        bad = next((i for i, reward in enumerate(group) if reward is None or not math.isfinite(reward)), None)
        if bad is not None:
            raise ValueError(
                f"sample {bad} of group {index} has reward {group[bad]}; a group's advantages need finite rewards: "
                "leave out the samples that have none"
            )
        r = np.asarray(group, np.float64)
        centred = r - r.mean() if len(r) else r
        spread = math.sqrt((centred**2).sum() / (len(r) - ddof)) if len(r) > ddof else 0.0
        advantages += (centred / (spread + eps) if scale else centred).tolist()
    return advantages
