"""GRPO (Shao et al., arXiv 2402.03300) and related algorithms with continuous generation: receive scored groups of
rollouts, take a corrected policy-gradient step, and publish new weights while the generator continues drawing."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from typing import Any

import msgspec
import torch
from torch import nn

from inflight.core.arguments import named, plain_number
from inflight.core.clock import now_ns
from inflight.core.decoders import convert
from inflight.core.errors import InflightError
from inflight.core.rollout import samples_of
from inflight.core.spans import span
from inflight.core.waiting import telling
from inflight.observability.loggers import JsonLines, Logger, TensorBoard
from inflight.training.config import GRPOConfig
from inflight.training.critic import Critic
from inflight.training.data.batch import PackedBatch
from inflight.training.data.demonstrations import Demonstration, packed_by_step
from inflight.training.data.examples import Submitted
from inflight.training.data.rewards import mean_parts
from inflight.training.data.scored_groups import Dropped, NothingToLearn, ScoredGroups, measure_consumed, measure_taken
from inflight.training.data.scoring import GroupScorer, Score, Scorer
from inflight.training.data.teacher_scoring import TeacherScorer
from inflight.training.evaluation import Evaluation, EvaluationResult
from inflight.training.model.forward import bf16_on_gpu
from inflight.training.objective.adaptive_entropy import AdaptiveEntropy
from inflight.training.objective.objective import resolve
from inflight.training.objective.probe import VersionProbe
from inflight.training.ranks.follower import Follower
from inflight.training.ranks.group import plain_fields
from inflight.training.ranks.joining import check_supported, join_ranks
from inflight.training.ranks.leader import Leader
from inflight.training.reference import charge_kl, reference_scorer
from inflight.training.report import StepReport
from inflight.training.schedules import (
    LIVE_S,
    SCHEDULES,
    Admission,
    Example,
    HasProgress,
    RolloutEngine,
    WeightPublisher,
    resolve_schedule,
)
from inflight.training.step import Learner, check_belong, check_finite, trained_adapter
from inflight.training.teacher import TeacherLike, prepare_teacher

__all__ = ["Example", "GRPOConfig", "StepReport", "grpo"]

logger = logging.getLogger(__name__)


@named()
def grpo(
    engine: RolloutEngine,
    publisher: WeightPublisher,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: Iterable[Any],
    score: Score | GroupScorer | None,
    config: GRPOConfig,
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    *,
    reference: nn.Module | None = None,
    teacher: TeacherLike | None = None,
    run: HasProgress | None = None,
    evaluation: Evaluation | None = None,
    demonstrations: Iterable[Sequence[Demonstration]] | None = None,
    loggers: Sequence[Logger] = (),
) -> Iterator[StepReport]:
    """Train for `config.steps` optimizer steps, or until the examples end. Yields a report after each step. Groups
    still in flight at the end are cancelled.

    If the examples end first, the groups in flight are trained on: the last step can have fewer groups than
    `config.groups_per_step`, and has a report like any other step. If all of these groups are left out, the report
    before was the last one. A warning at the end names the number of steps, the reason, and the groups that were
    omitted after the last step.

    The model's weights are published first, and are live before a prompt is submitted: every token is drawn by weights
    of this trainer.

    On several ranks all call this with the same arguments, after `inflight.launch`, and all get the same reports
    (docs/training.md#grpo-on-several-ranks). The gradient is the gradient of one rank, also of a plain module without
    DistributedDataParallel or FSDP2. Only rank 0 submits examples, scores, evaluates and logs. Raises RankLostError,
    naming a rank that has ended, and InflightError for what does not work on several ranks, and for ranks with other
    options or weights than rank 0.

    examples: prompts for `engine.submit` (text, token ids, chat messages, rows of a `datasets.Dataset`), or `Example`s
    of such a prompt and metadata. Examples that the engine refuses, or that can exceed `config.micro_batch_tokens` with
    an answer, are skipped, logged by their index and counted in `dropped.num_unfit_examples`. If the first ones do not
    fit, ValueError is raised. Examples with a method `observe`, such as an `inflight.Curriculum`, receive each group
    that is taken, with its rewards (docs/training.md#prompts-that-follow-rewards).
    engine: an engine, or `inflight.Episodes`, for which examples are rows of tasks. If the engine has slots for
    adapters and the model is a PEFT model, its active adapter draws the tokens. Raises ValueError if
    `Episodes` have another one, and InflightError if other weights have drawn all tokens of a step.
    score: a function of a rollout, plain or `async`, a `Scorer`, or several as `Rewards`. None: episodes have rewards;
    with a teacher, other rollouts have the reward 0.
    reference: the reference policy of a KL penalty, such as a copy of the model made before training. It is put into
    evaluation mode. None: a PEFT model without its adapters. If a KL penalty has neither, ValueError is raised at once.
    run: an `inflight.Run`. Its `progress` is updated before each report: save model, optimizer and `lr_scheduler` after
    a report, and then the run. If the run was loaded, training continues with the next step. Pass the same examples:
    the examples that were submitted before are skipped, and examples that observe rewards load their state.
    teacher: a model whose distribution the policy learns (`Objective.teacher_weight`). A module is scored here, batch
    by batch; an engine, the URL of a server, a function, or a `Teacher` of one of these scores groups as they finish.
    Raises ValueError or VocabularyError at once if it does not fit, and TeacherError if it does not answer.
    evaluation: begins before the first step, after every `evaluation.every` steps, and after the last. A finished
    evaluation is in the next report and in `evaluation.results`. The last one ends after the last report, and is only
    in `evaluation.results` and in the loggers.
    demonstrations: for each step, a list of demonstrations, pairs of token ids of a prompt and of its answer. Their
    negative log-likelihood is in the loss of the step (docs/training.md#demonstrations). The same on all ranks.
    InflightError is raised if they end before the run.
    loggers: each receives the numbers of every report, `log(step, report.as_dict())`. The caller closes them.
    An update with a non-finite loss or gradient is not taken; it is counted and logged. Non-finite weights are never
    published: NonFiniteWeightsError ends the run, and the engine keeps its weights.
    """
    group, objective = join_ranks(engine), resolve(config.objective)
    has_one_reward = score is not None and (isinstance(score, Scorer) or not isinstance(score, GroupScorer))
    with nullcontext() if group is None else group.together():
        score_reference = reference_scorer(
            objective, model, reference, reward_kl_weight=config.reward_kl_weight, autocast=config.autocast
        )
        are_episodes = not getattr(engine, "can_pin", True)
        if score is not None and are_episodes:
            raise ValueError("episodes have rewards: leave score out, or return the score from the rollout function")
        score, add_teacher = prepare_teacher(
            teacher, score, objective, model, engine, config.sampling, autocast=config.autocast
        )
        if group is not None:
            check_supported(model, config)
        check_finite(model)
        check_belong(model, optimizer, publisher)
        if score is None and teacher is None and not are_episodes:
            raise ValueError("only episodes have rewards: give a score function, or a teacher")
        adapter = trained_adapter(engine, model)
        if adapter is not None and resolve_schedule(config.schedule) is SCHEDULES["one_step_off"]:
            raise ValueError(
                'schedule="one_step_off" draws each batch under one version, and prompts with an adapter cannot be '
                'pinned to a version: choose "inflight" or "sync"'
            )
        if evaluation is not None:
            evaluation.follow(model)
        if config.advantages == "gdpo" and has_one_reward:
            raise ValueError("advantages 'gdpo' compare several rewards: give a score that is inflight.Rewards")
        progress = GRPOProgress() if run is None else convert(run.progress.get("grpo", {}), GRPOProgress)
    if isinstance(objective.entropy_weight, AdaptiveEntropy) and progress.entropy_weight:
        objective.entropy_weight.load_state_dict(progress.entropy_weight)
    of_steps = None
    if demonstrations is not None and progress.step < config.steps:
        left = packed_by_step(islice(demonstrations, progress.step, None), config.micro_batch_tokens)
        of_steps = chain([next(left)], left)  # An invalid first list raises before anything is drawn.
    learner = Learner(model, optimizer, config, lr_scheduler, score_reference, add_teacher, of_steps, group)
    ranks: Leader | None = None
    if group is not None:
        group.check_alike(model, plain_fields(config) | {"step": progress.step})
        if group.rank:
            stream: Any = engine.stream
            return Follower(stream, group, learner, publisher, run, evaluation).reports()
        assert engine.stream.sharing is not None
        ranks = Leader(engine.stream.sharing, group)

    def steps() -> Iterator[StepReport]:
        publishes = progress.step == 0 or publisher.version == 0 or engine.staleness.unpublished_steps > 0
        if ranks is not None:
            ranks.send("begin", b"publish" if publishes else b"")
        if publishes:  # Whichever weights the engine was launched with, it draws with the trainer's.
            version = publisher.publish()
            with telling(f"version {version}, the trainer's weights before the first step, goes live"):
                engine.wait_for_version(version, timeout_s=LIVE_S)
        for each in loggers:
            if isinstance(each, (JsonLines, TensorBoard)) and progress.step:
                each.continue_after(progress.step)
        trainer = _Trainer(engine, publisher, learner, progress, ranks, adapter)
        # Episodes name adapters themselves.
        of_prompts = None if are_episodes else adapter
        admission = Admission(engine, publisher, examples, score, config, progress, of_prompts)
        if config.train_as_they_finish:
            admission.while_incomplete = trainer.compute
        step = begin = progress.step
        with nullcontext() if evaluation is None else closing(evaluation):
            _begin_evaluation(engine, publisher, evaluation, progress)
            scorer = closing(score) if isinstance(score, TeacherScorer) else nullcontext()
            with _keeping_dropped_examples(run, admission), admission, closing(trainer), scorer:
                source = resolve_schedule(config.schedule).run(admission)
                for step, scored in enumerate(islice(source, max(0, config.steps - begin)), begin + 1):
                    report = trainer.take(step, scored, admission)
                    if evaluation is not None:
                        is_last = step == config.steps  # `_end_evaluation` waits for one in progress
                        if step % evaluation.every == 0 and not (is_last and evaluation.running):
                            evaluation.start(step, publisher.version)
                        report = replace(report, evaluations=tuple(evaluation.finished()))
                    # A run that the caller saves holds the groups in flight and the number of submitted examples.
                    with nullcontext() if run is None else admission.submitter.paused():
                        if run is not None:
                            evaluating = [] if evaluation is None else evaluation.running
                            run.progress["grpo"] = trainer.progress(step, admission, evaluating).as_dict()
                        if ranks is not None:
                            ranks.report(report, {} if run is None else run.progress["grpo"])
                        for each in loggers:
                            each.log(step, report.as_dict())
                        yield report
                    if ranks is not None:
                        ranks.ask()
            if step < config.steps:
                trainer.dropped += admission.unreported
                _warn_of_early_end(step, config.steps, admission)
            logger.info("left out of the batches: %s", trainer.dropped)
            last = [] if evaluation is None else _end_evaluation(evaluation, step, publisher.version, loggers)
            if ranks is not None:
                ranks.end(last)

    return steps() if ranks is None else ranks.lead(steps())


class GRPOProgress(Submitted, frozen=True):
    """Progress of `grpo`, from which a loaded run continues."""

    step: int = 0
    """Number of steps taken."""
    num_skipped: int = 0
    """As in StepReport; so is `dropped`."""
    dropped: dict[str, int] = {}
    evaluating: list[int] = []
    """Ids of the groups of an evaluation in progress."""
    entropy_weight: dict[str, Any] | None = None
    """State of an `AdaptiveEntropy`."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, JSON-like if the examples are. `Run.save` raises for examples that are not."""
        plain = msgspec.to_builtins(msgspec.structs.replace(self, unsubmitted=[]), enc_hook=plain_number)
        return plain | {"unsubmitted": self.unsubmitted}


@dataclass(slots=True)
class _Step:
    """The groups of the present step that the trainer has computed on."""

    taken: ScoredGroups | None = None
    """The groups of the step, as `Admission.take` returns them; None before the first part."""
    scored: ScoredGroups = field(default_factory=ScoredGroups)
    """The groups, with the rewards that their advantages are computed from, and the counts of what was omitted when
    they were packed."""
    batches: list[PackedBatch] = field(default_factory=list)
    """A batch for each part of which something is in the loss."""
    sum_reward_kl: float = 0.0


@dataclass(slots=True)
class _Trainer:
    """Takes the optimizer steps, and publishes after each."""

    engine: RolloutEngine
    publisher: WeightPublisher
    learner: Learner
    begin: GRPOProgress
    ranks: Leader | None = None
    """Shares each part of a step with the other ranks; None: the trainer has one rank."""
    adapter: str | None = None
    """The adapter that is trained, and that has to draw tokens of each step; None: the weights."""
    config: GRPOConfig = field(init=False)
    dropped: Dropped = field(init=False)
    num_skipped: int = field(init=False)
    probe: VersionProbe | None = field(init=False)
    present: _Step = field(init=False, default_factory=_Step)
    nothing_to_learn: NothingToLearn = field(init=False, default_factory=NothingToLearn)

    def __post_init__(self) -> None:
        self.config = self.learner.config
        self.num_skipped, self.dropped = self.begin.num_skipped, Dropped(**self.begin.dropped)
        self.probe = VersionProbe(self.learner.model) if self.config.probe_every else None
        if self.probe is not None:
            self.probe.remember(self.engine.staleness.trainer_version)

    def compute(self, scored: ScoredGroups, *, is_whole: bool = False) -> None:
        """Add the gradients of the groups of the present step that were not there in the last call. is_whole: no more
        groups follow. Raises InflightError if the groups do not begin with the groups of the last call."""
        config, present, meter = self.config, self.present, self.engine.staleness
        if present.taken is not None and present.taken is not scored:
            raise InflightError(
                "train_as_they_finish has computed on groups of one step, and the schedule goes on with others: a "
                "schedule yields what `take` has returned before it takes again; leave train_as_they_finish out"
            )
        new = part = ScoredGroups(scored.groups[len(present.scored.groups) :])
        least = 1 if is_whole or self.ranks is None else self.ranks.group.size
        if len(new.groups) < least:  # Fewer groups than ranks would leave ranks without one.
            return
        present.taken = scored
        drawn_with = {rollout.adapter for rollout in new.rollouts}
        if drawn_with and self.adapter not in drawn_with:
            trained = "the weights alone" if self.adapter is None else f"the adapter {self.adapter!r}"
            raise InflightError(
                f"the trainer trains {trained}, and other weights have drawn all tokens of a step: "
                f"pass Episodes(…, adapter={self.adapter!r}), or name it in session.complete"
            )
        score = self.learner.score_reference
        if config.reward_kl_weight and score is not None:
            charged = config
            if self.ranks is not None:  # Each rank splits its share into micro-batches.
                score = self.ranks.reference_scorer(score, config.micro_batch_tokens)
                charged = replace(config, micro_batch_tokens=0)
            with span("reference"):
                part, reward_kl = charge_kl(new, score, charged)
            present.sum_reward_kl += reward_kl * len(samples_of(part.rollouts))
        batch = part.pack(
            trainer_version=meter.trainer_version,
            foreign_versions=meter.foreign_versions,
            staleness=config.staleness,
            advantages=config.advantages,
            skip_uniform=config.skips_uniform_groups,
            mask_truncated=config.mask_truncated,
            adapters=[self.adapter],
        )
        measure_taken(meter, new, batch)
        present.scored.groups += part.groups
        present.scored.dropped += part.dropped
        present.scored.has_advantage |= part.has_advantage
        if batch is None:
            assert part.totals is not None
            self.learner.count(part.totals if self.ranks is None else self.ranks.count(part.totals))
            return
        batch.observers = self.engine.stream.observers
        present.batches.append(batch)
        of_step = 1.0 if is_whole else len(scored.groups) / config.groups_per_step
        self.learner.add(batch if self.ranks is None else self.ranks.share(batch, of_step), share=of_step)

    def take(self, step: int, scored: ScoredGroups, admission: Admission) -> StepReport:
        """Train on the groups of a step, and publish."""
        config, probe, meter, present = self.config, self.probe, self.engine.staleness, self.present
        self.compute(scored, is_whole=True)
        measure_taken(meter, ScoredGroups(replaced=scored.replaced), None)
        self.dropped += scored.dropped + present.scored.dropped
        if resolve(config.objective).is_about_rewards_alone:
            self.nothing_to_learn.note(present.scored)
        causes = None
        if present.batches and probe is not None and step % config.probe_every == 0:
            with bf16_on_gpu(self.learner.model, config.autocast):
                causes = probe.causes(present.batches[0], micro_batch_tokens=config.micro_batch_tokens)
        demonstrations = self.learner.next_demonstrations()
        if self.ranks is not None:
            self.ranks.send("step")
        update, staleness = self.learner.step(demonstrations), None
        self.num_skipped += update.num_skipped
        if present.batches:
            staleness = measure_consumed(meter, *present.batches)
        self.present = _Step()
        version = self.learner.publish(self.publisher)
        if probe is not None:
            probe.remember(meter.trainer_version)
        critic = config.advantages.step() if isinstance(config.advantages, Critic) else None
        has_reward_kl = config.reward_kl_weight and self.learner.score_reference is not None
        return StepReport(
            step=step,
            version=version,
            reward=scored.mean_reward,
            reward_parts=mean_parts(scored.drawn),
            num_tokens=sum(rollout.num_drawn for rollout in scored.rollouts),
            stats=update.stats,
            grad_norm=update.grad_norm,
            nll=update.nll,
            entropy_weight=update.entropy_weight,
            num_skipped=self.num_skipped,
            reward_kl=present.sum_reward_kl / len(samples_of(scored.rollouts)) if has_reward_kl else None,
            staleness=staleness,
            causes=causes,
            critic=critic,
            lead=admission.lead,
            dropped=self.dropped,
            failures=admission.failures,
            finished_ns=now_ns(),
            groups=scored.groups,
        )

    def close(self) -> None:
        """Drop the gradients of a step that was not taken, and the rollouts that a critic has kept for it."""
        if isinstance(self.config.advantages, Critic):
            self.config.advantages.forget()
        self.learner.drop()
        self.present = _Step()

    def progress(self, step: int, admission: Admission, evaluating: list[int]) -> GRPOProgress:
        """Return the progress of the run after a step."""
        dropped, weight = asdict(self.dropped), resolve(self.config.objective).entropy_weight
        # These were skipped while groups of the next step were submitted.
        dropped["num_unfit_examples"] += admission.submitter.fitting.num_unfit
        return GRPOProgress(
            **msgspec.structs.asdict(admission.submitter.submitted),
            step=step,
            num_skipped=self.num_skipped,
            dropped=dropped,
            evaluating=evaluating,
            entropy_weight=weight.state_dict() if isinstance(weight, AdaptiveEntropy) else None,
        )


@contextmanager
def _keeping_dropped_examples(run: HasProgress | None, admission: Admission) -> Iterator[None]:
    """The block drops the groups in flight at its end. Record their examples as not submitted, for a later save."""
    try:
        yield
    finally:
        if run is not None and "grpo" in run.progress:
            last = convert(run.progress["grpo"], GRPOProgress)
            run.progress["grpo"] = msgspec.structs.replace(last, **admission.submitter.submitted_again(last)).as_dict()


def _warn_of_early_end(step: int, steps: int, admission: Admission) -> None:
    submitter, lost = admission.submitter, str(admission.unreported)
    reason = f"the examples have ended ({submitter.num_submitted} were submitted or skipped)"
    if not submitter.examples.are_over:
        reason = "the schedule has ended, although examples are left"
    rest = "" if lost == "nothing" else f"; omitted after the last step: {lost}"
    logger.warning("training has ended after %d of %d steps: %s%s", step, steps, reason, rest)


def _begin_evaluation(
    engine: RolloutEngine, publisher: WeightPublisher, evaluation: Evaluation | None, progress: GRPOProgress
) -> None:
    """Evaluate before the first step, or repeat the evaluation in progress when the run was saved."""
    if progress.evaluating:
        engine.stream.ledger.drop(progress.evaluating)
        engine.cancel(progress.evaluating)
    if evaluation is not None and (progress.step == 0 or progress.evaluating):
        evaluation.start(progress.step, publisher.version)


def _end_evaluation(
    evaluation: Evaluation, step: int, version: int, loggers: Sequence[Logger]
) -> list[EvaluationResult]:
    """Wait for the running evaluation, and evaluate the last version if that is still missing. Returns the results that
    no report has."""
    evaluation.wait()
    if evaluation.last_begun != step:
        evaluation.start(step, version)
        evaluation.wait()
    results = evaluation.finished()
    for result in results:
        for each in loggers:
            each.log(step, result.as_dict())
    return results
