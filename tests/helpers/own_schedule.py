"""A custom schedule and an objective for tests. Runs name them "own_schedule:TWO_AHEAD" and "own_schedule:ICEPOP"."""

from collections.abc import Iterator

from inflight.training.data.scored_groups import ScoredGroups
from inflight.training.objective.objective import PRESETS
from inflight.training.schedules import Admission, Schedule


def refill_after_training(admission: Admission) -> Iterator[ScoredGroups]:
    """Submit the next prompts only once a batch has been trained on, so that the new weights draw all their tokens."""
    admission.fill()
    while (scored := admission.take()).groups:
        yield scored
        admission.wait_until_live()
        admission.fill()


TWO_AHEAD = Schedule(refill_after_training, batches_ahead=2)
ICEPOP = PRESETS["icepop"]
