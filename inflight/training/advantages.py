"""Group-relative advantages (Shao et al., DeepSeekMath, arXiv 2402.03300, §4.1)."""

from collections.abc import Sequence

import numpy as np


def group_advantages(rewards: Sequence[Sequence[float]], *, scale: bool = True, eps: float = 1e-4) -> list[float]:
    """(r − mean of its group) / (standard deviation of its group + eps), for every sample, groups concatenated.

    With `scale=False` the division is left out (Dr. GRPO, arXiv 2503.20783). A group of equal rewards gets 0.
    """
    advantages: list[float] = []
    for group in rewards:
        r = np.asarray(group, np.float64)
        centred = r - r.mean()
        advantages += (centred / (r.std() + eps) if scale else centred).tolist()
    return advantages
