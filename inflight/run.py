"""Saves the state of a training run, without model and optimizer, to a file, so that a killed trainer can continue."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch.distributed as dist

from inflight.core.arguments import named
from inflight.core.clock import now_ns
from inflight.core.errors import InflightError, InvalidRequestError, LayoutMismatchError, ProtocolError, RunFileError
from inflight.core.files import file_errors, replacing
from inflight.core.messages import Ids
from inflight.core.options import EngineOptions
from inflight.core.rollout import Rollout
from inflight.core.waiting import Wait
from inflight.core.workers import Workers
from inflight.fleet.engine import Engine
from inflight.fleet.ranks.attached import FollowingPublisher
from inflight.stream.held_groups import SavedGroup
from inflight.stream.rollout_codec import Arrays, RolloutHeader, arrays_of, decode, encode, header_of, make_rollout
from inflight.training.random_state import random_state, restore_random_state
from inflight.training.ranks.group import RankGroup
from inflight.training.schedules import LIVE_S

if TYPE_CHECKING:
    from inflight.weights.trainer.publisher import Publisher
    from inflight.weights.trainer.sharded import ShardSender
    from inflight.weights.trainer.state_dict_source import Weights

logger = logging.getLogger("inflight")

_MAGIC = b"inflight run 4\n"
_DIGEST_BYTES = 16
_ALL_RANKS = "all ranks call run.save and run.load"


class _Clock(msgspec.Struct, frozen=True):
    """The clocks at the time of saving. CLOCK_MONOTONIC begins again when a machine starts."""

    boot_id: str
    monotonic_ns: int
    since_epoch_ns: int

    @classmethod
    def read(cls) -> "_Clock":
        return cls(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), now_ns(), time.time_ns())

    def shift_to(self, now: "_Clock") -> int:
        """Return the offset, in ns, that moves times of this clock to the monotonic clock of `now`."""
        if self.boot_id == now.boot_id:
            return 0
        return (now.monotonic_ns - now.since_epoch_ns) - (self.monotonic_ns - self.since_epoch_ns)


class _EngineState(msgspec.Struct, frozen=True):
    """The part of a run that rank 0 saves: published versions and outstanding groups."""

    fingerprint: str
    published: list[tuple[int, int]]
    """Versions, each with the time of its publication."""
    groups: list[SavedGroup[RolloutHeader]]
    next_ids: Ids
    changes: dict[int, list[str]] = {}
    """Maps versions that changed some adapters alone to these adapters."""


class _File(msgspec.Struct, frozen=True):
    version: int
    clock: _Clock
    progress: dict[str, Any]
    engine: _EngineState | None
    """None if another rank than 0 wrote the file."""

    @property
    def rollouts(self) -> list[RolloutHeader]:
        return [header for group in (self.engine.groups if self.engine else ()) for header in group.rollouts]


@named()
class Run:
    """Saves and loads the state of a training run. The trainer itself saves model, optimizer and the like.

    The state consists of the submitted prompts whose groups were not taken, with every token that has arrived and the
    calls of episodes in progress; the number of the weights' version; the state of the random number generators; and
    `progress`. Under torchrun each rank has a separate Run.
    """

    def __init__(self, engine: Engine, publisher: "Publisher | ShardSender | FollowingPublisher"):
        """Raises TypeError for other objects."""
        for name, given, part in (("engine", engine, "rank"), ("publisher", publisher, "version")):
            if not hasattr(given, part):
                raise TypeError(
                    f"{name} is {type(given).__name__}: pass inflight.Run(engine, publisher) the engine of launch() or "
                    "attach(), also for Episodes, and what engine.publisher() has returned"
                )
        self._engine, self._publisher = engine, publisher
        self.progress: dict[str, Any] = {}
        """Notes of the trainer, saved with the run; JSON-like. `grpo` stores its own progress under "grpo"."""

    def save(self, directory: str | Path) -> None:
        """Write a file into the directory. It appears whole or not at all. Generation continues.

        Call it between two steps or after the last one: yielded rollouts are recorded as trained on. With several ranks
        call it after `publish`: the weights are recorded as published. Save model and optimizer into the directory
        first: then the checkpoint is complete if this file exists. All ranks call it, and wait for each other for at
        most `rank_timeout_s`. Raises RunFileError if it cannot be written, or InvalidRequestError for metadata or
        progress that is not JSON-like or has keys that are not strings, on all ranks.
        """
        with self._together():
            for key in self.progress:
                if not isinstance(key, str):
                    raise InvalidRequestError(f"keys of run.progress must be strings, got {key!r}")
            path, engine = self._path(directory), self._engine
            version = self._publisher.version
            if engine.rank == 0 and engine.stream.sharing is None and engine.staleness.unpublished_steps:
                # Steps were taken since: `load` publishes other weights than this version's tokens are from.
                version += 1
            header = _File(version, _Clock.read(), self.progress, None)
            arrays: list[Arrays] = []
            if engine.rank == 0:
                described, arrays = _describe(engine, version)
                header = msgspec.structs.replace(header, engine=described)
            _write(path, header, [*arrays, random_state()])

    def load(self, directory: str | Path, weights: "Weights | None" = None) -> None:
        """Continue where `save` was called, with another engine of the same model to which nothing was submitted.

        Load the model first: its weights are published under their old number, and then the engine continues the
        unfinished groups. weights: the weights to publish if the publisher has no model. Groups that were pinned to
        older weights end with finish_reason "error", since those weights are lost. If the machine was restarted in
        between, times are moved to its new clock by the time of day. Raises RunFileError, naming the fault of the file,
        LayoutMismatchError if it is of another model, and the errors of `publish`.
        """
        engine = self._engine
        with self._together():
            header, arrays, random_arrays = _read(self._path(directory))
            if engine.rank == 0 and header.engine is not None:
                if header.engine.fingerprint != engine.info.layout.fingerprint:
                    raise LayoutMismatchError(
                        f"the run in {directory} was saved with other tensors, shapes or dtypes than this engine's"
                    )
                if engine.stream.outstanding:
                    raise RunFileError("prompts were submitted already; load a run before that")
                _check_adapters(header.engine.groups, engine.options)
            elif engine.rank == 0 or header.engine is not None:
                raise RunFileError(f"{self._path(directory)} was written by another rank than the one that reads it")
            if 0 < self._publisher.version >= header.version:
                raise RunFileError(
                    f"version {self._publisher.version} was published already, and the run goes on from "
                    f"{header.version}; load a run before anything is published, on a newly launched engine"
                )
        with self._together():
            if header.version:
                self._publisher.continue_from(header.version)
                self._publisher.publish(*(() if weights is None else (weights,)))
            if engine.rank == 0 and header.engine is not None:
                engine.wait_for_version(header.version, timeout_s=LIVE_S)
                shift_ns = header.clock.shift_to(_Clock.read())
                published = [(version, ns + shift_ns) for version, ns in header.engine.published]
                engine.staleness.restore(published, header.engine.changes)
                groups = _saved_groups(header.engine, arrays, shift_ns)
                engine.stream.ledger.engines.restore(groups, header.engine.next_ids)
                if num_open := sum(group.is_open for group in groups):
                    logger.warning(
                        "the run has %d group%s of episodes: grpo(episodes, …) or episodes.continue_saved() continues "
                        "them; until then they stay unfinished", num_open, "s" * (num_open != 1),
                    )  # fmt: skip
            self.progress = header.progress
            restore_random_state(random_arrays)

    def _path(self, directory: str | Path) -> Path:
        rank = self._engine.rank
        return Path(directory) / (f"run-rank{rank}.inflight" if rank else "run.inflight")

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Wait for the other ranks, if there are any, before and after the block. If it raises an error on one rank,
        all ranks raise."""
        stream = cast(Any, self._engine.stream)
        ranks: Any = stream if self._engine.rank else stream.sharing
        if ranks is None or not dist.is_initialized() or dist.get_world_size() < 2:
            yield
            return
        group = self._meet(ranks.check)
        try:
            with group.together():
                group.largest(0)
                yield
        finally:
            group.close()

    def _meet(self, check: Callable[[], None]) -> RankGroup:
        """Wait until all ranks have called this. Raises RankLostError if one is lost, and InflightError if one does
        not call it within `rank_timeout_s`. Ranks cannot meet again after that."""
        bound_s, wait = self._engine.options.rank_timeout_s, Wait()
        met = Workers("ranks").start(RankGroup, check)  # It blocks, and cannot see a lost rank.
        while wait.waited_s < bound_s:
            try:
                return met.result(timeout=min(1.0, bound_s))
            except FutureTimeoutError:
                wait.tick(_ALL_RANKS)
                check()
        raise InflightError(
            f"{_ALL_RANKS}, and one has not within {bound_s:g} s (launch with rank_timeout_s for another bound); "
            "start the ranks again, from the last checkpoint"
        )


def _check_adapters(groups: Sequence[SavedGroup[RolloutHeader]], options: EngineOptions) -> None:
    """Raise RunFileError if the engine lacks the adapter of an unfinished group."""
    known = options.adapters if options.lora_rank else ()
    for group in groups:
        if (name := group.prompt.adapter) is not None and name not in known:
            raise RunFileError(
                f"group {group.ids.group_id} of the run is drawn with the adapter {name!r}, and the engine has "
                f"{', '.join(map(repr, known)) or 'no adapters'}: launch with the lora_rank and the adapters of the run"
            )


def _describe(engine: Engine, version: int) -> tuple[_EngineState, list[Arrays]]:
    """Return the state of an engine and the arrays of its rollouts. version: of the trainer's weights."""
    ledger = engine.stream.ledger
    with ledger.table.lock:  # so that groups and ids are of one moment
        saved, next_ids = ledger.engines.snapshot(), ledger.engines.next_ids
    published, changes = engine.staleness.history(version)
    groups: Any = [msgspec.structs.replace(g, rollouts=[header_of(r) for r in g.rollouts]) for g in saved]
    described = _EngineState(
        fingerprint=engine.info.layout.fingerprint,
        published=published,
        changes=changes,
        groups=groups,
        next_ids=next_ids,
    )
    return described, [arrays_of(rollout) for group in saved for rollout in group.rollouts]


def _saved_groups(engine: _EngineState, arrays: Sequence[Arrays], shift_ns: int) -> list[SavedGroup[Rollout]]:
    of_rollouts = iter(arrays)

    def rollout_of(header: RolloutHeader) -> Rollout:
        rollout = make_rollout(header, next(of_rollouts))
        turns = tuple(turn.shifted(shift_ns) for turn in rollout.turns)
        return replace(rollout, sampled_at_ns=rollout.sampled_at_ns + shift_ns, turns=turns)

    groups: Any = [msgspec.structs.replace(g, rollouts=[rollout_of(h) for h in g.rollouts]) for g in engine.groups]
    return groups


def _write(path: Path, header: _File, arrays: Sequence[Arrays]) -> None:
    """Write a file that only its owner can read, and that appears whole or not at all."""
    payload = encode(header, arrays)
    with file_errors(RunFileError, f"cannot write {path}"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        replacing(path, RunFileError) as partial,
        open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file,
    ):
        file.writelines([_MAGIC, blake2b(payload, digest_size=_DIGEST_BYTES).digest(), payload])
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> tuple[_File, list[Arrays], Arrays]:
    """Return the header, the arrays of its rollouts, and the arrays of the random state."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RunFileError(f"no run was saved in {path.parent}: {path.name} is not there") from None
    except OSError as error:
        raise RunFileError(f"cannot read {path}: {error.strerror or error}") from error
    begin = len(_MAGIC) + _DIGEST_BYTES
    if not data.startswith(_MAGIC):
        raise RunFileError(f"{path} is no run that this version of inflight has saved")
    if blake2b(data[begin:], digest_size=_DIGEST_BYTES).digest() != data[len(_MAGIC) : begin]:
        raise RunFileError(f"{path} is damaged: its checksum does not fit; take an older checkpoint")
    try:
        header, arrays = decode(data[begin:], _File, lambda header: len(header.rollouts) + 1)
    except ProtocolError as error:
        raise RunFileError(f"{path} cannot be read: {error}") from error
    return header, arrays[:-1], arrays[-1]
