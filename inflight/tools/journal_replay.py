"""Replays of journals: `inflight.replay` and the command `inflight replay`."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from inflight.core.arguments import named
from inflight.core.closing import ClosedAtEnd
from inflight.engine.model.loading import load_tokenizer
from inflight.observability.staleness_meter import StalenessMeter
from inflight.stream.held_groups import Group
from inflight.stream.journal import JournalReader
from inflight.stream.ledger import Ledger
from inflight.stream.replay import ReplaySource, summarize
from inflight.tools.progress import shown_on
from inflight.training.data.rollout_stream import RolloutStream

Keep = Callable[[Group], bool]


class Replay(RolloutStream, ClosedAtEnd):
    """Stream of a journal, like the stream of the trainer that wrote it.

    `groups`, `batches` and `collect` return every finished group in the order of their ends. Use it as a context
    manager, or call `close()`.

    A journal has no rewards: `batches` and `groups` take a score function, and the order of batches does not depend on
    its speed. The version of the trainer is the newest version that drew a token of the groups returned so far.
    """

    def __init__(self, directory: str | Path, *, model: str | None, keep: Keep | None, skip_damage: bool):
        """Take the arguments of `replay`."""
        tokenizer = None if model is None else load_tokenizer(model)
        if model is not None and tokenizer is None:
            raise ValueError(f"{model} has no tokenizer that can be loaded; without a model rollouts have no text")
        self.group_ids: list[int] = []
        """Return ids of the kept groups in the order of their ends."""
        left_out: list[int] = []

        def note(group: Group) -> None:
            (self.group_ids if keep is None or keep(group) else left_out).append(group[0].group_id)

        self.summary = summarize(JournalReader(directory, skip_damage=skip_damage), note)
        """Content of the journal."""
        ledger = Ledger()
        super().__init__(
            ReplaySource(JournalReader(directory, skip_damage=skip_damage), self.summary, ledger),
            ledger,
            tokenizer=tokenizer,
            meter=StalenessMeter(),
            check_engine=lambda: None,
            in_order=True,
        )
        self.scoring.on_next = self._note_versions
        self.ledger.expect([*self.group_ids, *left_out])
        self.ledger.drop(left_out)

    def _note_versions(self, group: Group) -> None:
        newest = max((int(r.weight_versions.max()) for r in group if len(r.weight_versions)), default=0)
        self._meter.trainer_version = max(self._meter.trainer_version, newest)


@named()
def replay(
    directory: str | Path, *, model: str | None = None, keep: Keep | None = None, skip_damage: bool = False
) -> Replay:
    """Replay a journal that `launch(…, journal=directory)` wrote. `replay(…).batches(…)` replaces
    `engine.stream.batches(…)`.

    model: a directory or a hub id with a tokenizer; None: rollouts have no text. keep: a function of a finished group
    that returns whether to replay it; None: all groups. A journal contains all groups, including those of evaluations
    and of `submit(…, train=False)`; use metadata to separate them. skip_damage: continue after damaged rows, with a
    warning for each; StreamGapError is raised once for each, as in a live stream that loses frames. Raises JournalError
    for a missing or damaged journal, and ValueError if the model has no tokenizer.
    """
    return Replay(directory, model=model, keep=keep, skip_damage=skip_damage)


def content(console: Console, directory: Path) -> dict[str, Any]:
    """Return the counts, times and damage of a journal. Raises JournalError."""
    reader = JournalReader(directory, skip_damage=True)
    num_bytes = max(1, reader.path.stat().st_size)
    with shown_on(console) as progress:
        found = summarize(reader, lambda _: progress("reading the journal", min(1.0, reader.num_bytes / num_bytes)))
    return asdict(found)
