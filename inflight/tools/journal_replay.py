"""Replays of journals: `inflight.replay` and the command `inflight replay`."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from inflight.engine.model.loading import load_tokenizer
from inflight.observability.staleness_meter import StalenessMeter
from inflight.stream.group_table import GroupRecord
from inflight.stream.held_groups import Group
from inflight.stream.journal import JournalReader
from inflight.stream.ledger import Ledger
from inflight.stream.replay import ReplaySource, read_groups, summarize
from inflight.tools.plots import new_table
from inflight.tools.progress import shown_on
from inflight.training.data.rollout_stream import RolloutStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from inflight.training.data.scoring import GroupScorer

Keep = Callable[[Group], bool]
_SHOWN_IDS = 64


class Replay(RolloutStream):
    """Stream of a journal, like the stream of the trainer that wrote it.

    `groups`, `batches` and `collect` return every finished group in the order of their ends. Use it as a context
    manager, or call `close()`.

    A journal has no rewards: `batches` and `groups` take a score function, and the order of batches does not depend on
    its speed. The version of the trainer is the newest version that drew a token of the groups returned so far.
    """

    def __init__(self, directory: str | Path, *, model: str | None, keep: Keep | None, skip_damage: bool):
        """Take the arguments of `replay`."""
        self.group_ids: list[int] = []
        """Return ids of the kept groups in the order of their ends."""
        left_out: list[int] = []

        def note(group: Group) -> None:
            (self.group_ids if keep is None or keep(group) else left_out).append(group[0].group_id)

        self.summary = summarize(JournalReader(directory, skip_damage=skip_damage), note)
        """Content of the journal."""
        source = ReplaySource(JournalReader(directory, skip_damage=skip_damage), self.summary)
        super().__init__(
            source,
            Ledger(),
            tokenizer=_tokenizer(model),
            meter=StalenessMeter(),
            check_engine=lambda: None,
            in_order=True,
        )
        self.ledger.expect([*self.group_ids, *left_out])
        self.ledger.drop(left_out)
        source.read_for(self.ledger)

    def __enter__(self) -> "Replay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _borrow(self, scorer: "GroupScorer | None") -> "GroupRecord | Future[None] | None":
        record = super()._borrow(scorer)
        if isinstance(record, GroupRecord):
            newest = max((int(r.weight_versions.max()) for r in record.rollouts if len(r.weight_versions)), default=0)
            self._meter.trainer_version = max(self._meter.trainer_version, newest)
        return record


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


def report(console: Console, directory: Path, *, num_groups: int = 0, model: str | None = None) -> dict[str, Any]:
    """Print the content of a journal and its first groups, and return the content. Raises JournalError."""
    reader = JournalReader(directory, skip_damage=True)
    num_bytes = max(1, reader.path.stat().st_size)
    with shown_on(console) as progress:
        found = summarize(reader, lambda _: progress("reading the journal", min(1.0, reader.num_bytes / num_bytes)))
    shown = new_table(str(directory), "", "", left="")
    shown.add_row("frames", f"{found.num_frames:,}, {found.num_bytes / 1e6:,.1f} MB")
    shown.add_row("runs, engines", f"{found.num_runs}, {found.num_engines}")
    shown.add_row("tokens", f"{found.num_tokens:,}")
    shown.add_row("groups", f"{found.num_groups:,} finished, {found.num_unfinished_groups:,} unfinished")
    shown.add_row("rollouts", f"{found.num_rollouts:,}")
    shown.add_row("versions", f"{found.first_version} to {found.last_version}, {found.num_swaps:,} swaps")
    shown.add_row("time", f"{found.seconds:,.1f} s, {found.tokens_per_s:,.0f} tokens/s")
    shown.add_row("gaps, damage", f"{found.num_gaps}, {len(found.damage)}")
    console.print(shown)
    for damage in found.damage:
        console.print(f"damage: {damage}", markup=False, highlight=False)
    if num_groups:
        _show_groups(console, reader, num_groups, model)
    return asdict(found)


def _tokenizer(model: str | None) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer. Raises ValueError if the given model has none."""
    tokenizer = None if model is None else load_tokenizer(model)
    if model is not None and tokenizer is None:
        raise ValueError(f"{model} has no tokenizer that can be loaded; without a model tokens are shown as ids")
    return tokenizer


def _show_groups(console: Console, reader: JournalReader, num_groups: int, model: str | None) -> None:
    tokenizer = _tokenizer(model)

    def show(name: str, ids: list[int]) -> None:
        if tokenizer is not None:
            text = repr(tokenizer.decode(ids, skip_special_tokens=True))
        else:
            text = " ".join(map(str, ids[:_SHOWN_IDS])) + (f" … {len(ids)} tokens" if len(ids) > _SHOWN_IDS else "")
        console.print(f"  {name}: {text}", markup=False, highlight=False, soft_wrap=True)

    for _, groups in read_groups(reader):
        for group in groups[:num_groups]:
            num_groups -= 1
            console.print(f"group {group[0].group_id}", highlight=False)
            show("prompt", group[0].prompt_token_ids.tolist())
            for rollout in group:
                versions = rollout.weight_versions
                drawn = f", versions {versions[0]} to {versions[-1]}" if len(versions) else ""
                show(f"sample {rollout.sample} ({rollout.finish_reason}{drawn})", rollout.token_ids.tolist())
        if not num_groups:
            return
