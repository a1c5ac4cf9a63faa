"""Turns of a saved run. Its episodes get them again without drawing them."""

from collections.abc import Container, Iterable
from typing import NamedTuple

from inflight.core.rollout import Rollout
from inflight.stream.group_table import GroupRecord

EPISODE = "inflight.episode"
"""Key of the place of a turn in the metadata of its group."""
SEEN = "inflight.seen"
"""Key of the numbers of tokens of a turn that the function that watches it got, in the metadata of the noted turn."""


class Place(NamedTuple):
    """The place of a turn in a run."""

    group_id: int
    sample: int
    number: int
    """Number of the turn among the turns of its episode, in the order of their requests."""
    digest: str
    """Digest of all tokens before the turn."""


class SavedTurns:
    """Turns that were drawn, and turns in progress, by their places in episodes."""

    def __init__(self) -> None:
        self._drawn: dict[Place, Rollout] = {}
        self._drawing: dict[Place, int] = {}
        """Maps turns in progress to their groups."""

    def add_drawing(self, records: Iterable[GroupRecord], group_ids: Container[int]) -> None:
        """Add the turns in progress among these groups, of episodes of the groups `group_ids`."""
        for record in records:
            metadata = record.prompt.metadata if record.prompt is not None else {}
            if EPISODE in metadata and record.is_wanted and (place := Place(*metadata[EPISODE])).group_id in group_ids:
                self._drawing[place] = record.group_id

    def add_drawn(self, turns: Iterable[Rollout]) -> None:
        """Add turns that were drawn."""
        self._drawn |= {Place(*turn.metadata[EPISODE]): turn for turn in turns}

    def take(self, place: Place) -> Rollout | int | None:
        """Remove and return the turn of this place, or the group that draws it; None if neither was saved."""
        return self._drawn.pop(place, None) or self._drawing.pop(place, None)

    def forget(self, group_id: int) -> list[int]:
        """Forget the turns that no episode of a group has asked for. Returns the groups that draw them."""
        for place in [place for place in self._drawn if place.group_id == group_id]:
            del self._drawn[place]
        unclaimed = [place for place in self._drawing if place.group_id == group_id]
        return [self._drawing.pop(place) for place in unclaimed]
