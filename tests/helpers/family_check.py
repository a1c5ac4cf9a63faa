"""Whether engine and trainer compute what Transformers computes for a family, or refuse it by name.

The truth is Transformers' own full forward pass over each sequence, alone, with eager attention and without a cache.
"""

import copy
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from family_configs import VOCABULARY, Family, auto_class
from family_weights import make_model
from tiny_models import run
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel

from inflight.core.errors import InflightError, ModelLoadError
from inflight.core.messages import Prompt
from inflight.core.options import EngineOptions
from inflight.core.rollout import Rollout
from inflight.core.sampling import SamplingParams
from inflight.engine.loop.engine import Engine
from inflight.engine.model.checkpoints import auto_class as loading_class
from inflight.engine.model.loading import load_config
from inflight.training.data.batch import pack
from inflight.training.model.forward import token_logprobs

FP32_BOUND = 1e-3
"""Nats. Distributions are peaked (logits of 10 and more), and every token is compared."""
BF16_RATIO = 1.2
BF16_FLOOR = 2e-3
"""Nats, mean over the tokens: what two correct orders of summation in bf16 may differ in whatever the model is."""

FUSED, UNFUSED, RIGHT, REFUSED = "right, fused", "right, unfused", "right", "refused"
WRONG, UNNAMED, NOT_BUILT = "WRONG", "UNNAMED ERROR", "not built"
GOOD = (FUSED, UNFUSED, RIGHT, REFUSED)


class Outcome(NamedTuple):
    kind: str
    """One of the above."""
    reason: str = ""

    @property
    def good(self) -> bool:
        return self.kind in GOOD


@dataclass(frozen=True, slots=True)
class Result:
    family: str
    engine: Outcome
    trainer: Outcome


def check_family(family: Family) -> Result:
    """Try a family on both sides."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("ignore")
        config = _config(family)
        names = _names_of(config)
        try:
            model = make_model(family)
        except Exception as error:  # no model to compare with; whoever asks for it must be told so
            config.save_pretrained(directory)
            return Result(family.name, _check_config(directory, names), Outcome(NOT_BUILT, _line(error)))
        model.save_pretrained(directory)
        names.add(type(model).__name__)
        truth = model if _runs_on_tokens(model) else None
        engine = _check_engine(directory, truth, names)
        if engine.kind in (FUSED, UNFUSED):
            engine = _check_fusion(family, engine)
        return Result(family.name, engine, _check_trainer(model, names, truth))


def check_engine(family: Family, device: str) -> Outcome:
    """Compare the engine on this device with Transformers on the CPU."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as directory:
        warnings.simplefilter("ignore")
        model = make_model(family)
        model.save_pretrained(directory)
        return _check_engine(directory, model, _names_of(model.config), device)


def check_trainer(family: Family, device: str) -> Outcome:
    """Compare the packed log-probabilities of the trainer on this device with Transformers on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make_model(family)
        trained, rollouts = copy.deepcopy(model).to(device).train(), long_rollouts()
        logprobs = token_logprobs(trained, pack(rollouts, [1.0] * len(rollouts)))
        logprobs.sum().backward()
        return _judge(model, logprobs.detach().cpu(), rollouts, trained)


def _config(family: Family) -> PretrainedConfig:
    """A small configuration, or the one by default where none is found; a model is not made of that."""
    try:
        return family.config()
    except Exception:
        return CONFIG_MAPPING[family.model_type]()


def _runs_on_tokens(model: PreTrainedModel) -> bool:
    """Whether the model makes anything of tokens alone, one after another."""
    try:
        return _logits(model, [3] * 5).shape == (5, VOCABULARY) and _is_causal(model)
    except Exception:
        return False


# ---- truth ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: list[int] | np.ndarray) -> torch.Tensor:
    """f64[T, V] of one sequence by itself."""
    return model(input_ids=torch.as_tensor(np.asarray(ids)).long()[None], use_cache=False).logits[0].double()


def _is_causal(model: PreTrainedModel) -> bool:
    """Whether a token's logits do not depend on those that come after it."""
    ids = np.random.default_rng(5).integers(10, VOCABULARY, 40)
    other = ids.copy()
    other[30:] = (other[30:] + 7) % (VOCABULARY - 10) + 10
    return torch.allclose(_logits(model, ids)[:30], _logits(model, other)[:30], atol=1e-3)


def _of_drawn(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities f64[T, V] from which the tokens of a rollout were drawn, at its temperature."""
    ids = np.concatenate([rollout.prompt_token_ids, rollout.token_ids])
    logits = _logits(model, ids)[len(rollout.prompt_token_ids) - 1 : -1, :]
    for begin, end in rollout.banned:
        logits[:, begin:end] = -torch.inf
    return torch.log_softmax(logits / (rollout.params.temperature or 1.0), -1)


def _differences(model: PreTrainedModel, rollouts: list[Rollout]) -> np.ndarray:
    """|recorded − model's|, in nats, of all drawn tokens."""
    return np.concatenate([np.abs(_picked(_of_drawn(model, r), r) - r.logprobs) for r in rollouts])


def _bound(model: PreTrainedModel, rollouts: list[Rollout]) -> float:
    """What a log-probability may be off by: where rounding alone moves a model far, a small multiple of that."""
    own = 0.0
    for rollout in rollouts:
        precise, rounded = (_picked(_of_drawn(m, rollout), rollout) for m in (_precise(model), model))
        own = max(own, np.abs(precise - rounded).max())
    return max(FP32_BOUND, 5 * own)


def _precise(model: PreTrainedModel) -> PreTrainedModel:
    """In fp64, or as it is if it has parts that know nothing of fp64."""
    precise = copy.deepcopy(model).double()
    try:
        _logits(precise, [3] * 5)
    except RuntimeError:
        return model
    return precise


def _picked(logprobs: torch.Tensor, rollout: Rollout) -> np.ndarray:
    return logprobs[torch.arange(len(logprobs)), torch.from_numpy(rollout.token_ids).long()].numpy()


# ---- engine -----------------------------------------------------------------------------------------------------


def _prompts(max_context: int) -> tuple[list[Prompt], list[int]]:
    """Ragged prompts, and the steps at which they arrive: from one token to more than any window and threshold, the
    longest beyond what one pass takes, some greedy, one of two samples. All within the context."""
    rng = np.random.default_rng(0)
    prompts, arrivals = [], []
    for index, length in enumerate((1, 40, 7, 23, 3, 60, 16, 31, 5, 12)):
        length = min(length, max_context // 2)
        params = SamplingParams(
            max_tokens=min(32 if index < 6 else 48, max_context - length),
            temperature=0.0 if index in (1, 4, 7) else 1.0,
            seed=index,
            n=2 if index == 3 else 1,
            ignore_eos=True,
        )
        prompts.append(Prompt(rng.integers(10, VOCABULARY, length).tolist(), params))
        arrivals.append((0, 0, 0, 1, 4, 4, 6, 9, 9, 12)[index])
    return prompts, arrivals


@contextmanager
def _engine(directory: str, dtype: str, device: str = "cpu") -> Iterator[Engine]:
    options = EngineOptions(
        model=directory, device=device, dtype=dtype, max_sequences=12, max_prefill_tokens=16, kv_cache_tokens=2048
    )
    engine = Engine(options)
    try:
        yield engine
    finally:
        engine.close()


def _generate(directory: str, dtype: str, device: str = "cpu") -> tuple[list[Rollout], str | None]:
    """What the engine draws, and why it runs unfused, if it does."""
    with _engine(directory, dtype, device) as engine:
        prompts, arrivals = _prompts(engine.options.max_context)
        rollouts = run(engine, prompts, arrivals=arrivals)
        return rollouts, engine.runner.unfused_reason


def _check_config(directory: str, names: set[str]) -> Outcome:
    """Whether a model that cannot be built here is refused before it is loaded."""
    try:
        load_config(directory)
    except Exception as error:
        return _refusal(error, (ModelLoadError,), names)
    return Outcome(NOT_BUILT, "its configuration is accepted")


def _check_engine(directory: str, model: PreTrainedModel | None, names: set[str], device: str = "cpu") -> Outcome:
    reasons: list[str | None] = []
    for dtype, check in (("float32", _wrong_in_fp32), ("bfloat16", _wrong_in_bf16)):
        try:
            rollouts, unfused = _generate(directory, dtype, device)
        except Exception as error:
            outcome = _refusal(error, (ModelLoadError,), names)
            if outcome.good and reasons:
                return Outcome(WRONG, f"runs in fp32, refused in bf16: {outcome.reason}")
            return outcome
        if model is None:
            return Outcome(WRONG, "runs, but is no model in which tokens see those before them and nothing else")
        wrong = check(directory, model, rollouts)
        if wrong is not None:
            how = "fused" if unfused is None else "unfused"
            return Outcome(WRONG, f"{dtype}, {how}: {wrong}")
        reasons.append(unfused)
    if len(set(reasons)) > 1:
        return Outcome(WRONG, f"fused in one dtype only: {reasons}")
    return Outcome(FUSED) if reasons[0] is None else Outcome(UNFUSED, reasons[0])


def _check_fusion(family: Family, outcome: Outcome) -> Outcome:
    """Whether a model is fused must not depend on how large its weights are, nor on the dtype."""
    with tempfile.TemporaryDirectory() as directory:
        make_model(family, large=False).save_pretrained(directory)
        with _engine(directory, "bfloat16") as engine:
            unfused = engine.runner.unfused_reason
    if (unfused is None) != (outcome.kind == FUSED):
        return Outcome(WRONG, f"{outcome.kind} ({outcome.reason}); with small weights in bf16: {unfused or 'fused'}")
    return outcome


def _wrong_in_fp32(directory: str, model: PreTrainedModel, rollouts: list[Rollout]) -> str | None:
    worst = _differences(model, rollouts).max()
    if not worst <= FP32_BOUND and not worst <= _bound(model, rollouts):
        return f"log-probabilities are off by up to {worst:.2g} nats"
    for rollout in rollouts:
        if rollout.params.greedy:
            logprobs = _of_drawn(model, rollout)
            behind = (logprobs.max(-1).values - logprobs.gather(-1, _ids(rollout))[:, 0]).max().item()
            if behind > 2 * FP32_BOUND:
                return f"a greedy row draws a token {behind:.2g} nats below the likeliest"
    return None


def _ids(rollout: Rollout) -> torch.Tensor:
    return torch.from_numpy(rollout.token_ids).long()[:, None]


def _wrong_in_bf16(directory: str, model: PreTrainedModel, rollouts: list[Rollout]) -> str | None:
    """Against fp32 over the rounded weights, the engine may be off by what Transformers' own bf16 is off by.

    Means over tokens, compared pairwise: a few tokens of a peaked distribution hold most of either mean, so that a
    mean by itself says little. It is wrong if the excess is more than three standard errors over sequences."""
    theirs = _load(directory, torch.bfloat16)
    truth = _load(directory, torch.bfloat16).float()
    excesses, ours, others = [], [], []
    for rollout in rollouts:
        exact = _picked(_of_drawn(truth, rollout), rollout)
        our = np.abs(exact - rollout.logprobs)
        their = np.abs(exact - _picked(_of_drawn(theirs, rollout), rollout))
        excesses.append((our - BF16_RATIO * their - BF16_FLOOR).sum())
        ours.append(our)
        others.append(their)
    error = np.std(excesses, ddof=1) * len(excesses) ** 0.5
    total = np.sum(excesses)
    if total > 3 * error or not np.isfinite(total):
        our, their = np.concatenate(ours).mean(), np.concatenate(others).mean()
        return f"log-probabilities are off by {our:.2g} nats on average, Transformers' by {their:.2g}"
    return None


def _load(directory: str, dtype: torch.dtype) -> PreTrainedModel:
    auto = loading_class(AutoConfig.from_pretrained(directory))
    return auto.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


# ---- trainer ----------------------------------------------------------------------------------------------------


def long_rollouts() -> list[Rollout]:
    """Drawn from nothing: sequences longer than every window, two of which answer one prompt."""
    rng = np.random.default_rng(1)
    rollouts = []
    for index, (prompt, drawn) in enumerate([(20, 44), (20, 30), (1, 40), (50, 20), (9, 5)]):
        group = max(index - 1, 0)
        ids = np.random.default_rng(group).integers(10, VOCABULARY, prompt).astype(np.int32)
        rollouts.append(
            Rollout(
                request_id=index,
                group_id=group,
                sample=int(index == 1),
                params=SamplingParams(),
                metadata={},
                prompt_token_ids=ids,
                token_ids=rng.integers(10, VOCABULARY, drawn).astype(np.int32),
                logprobs=np.full(drawn, -1.0, np.float32),
                weight_versions=np.zeros(drawn, np.int64),
                sampled_at_ns=np.zeros(drawn, np.int64),
                finish_reason="length",
            )
        )
    return rollouts


def _check_trainer(model: PreTrainedModel, names: set[str], truth: PreTrainedModel | None) -> Outcome:
    """`truth`: the model, or None if there is nothing to compare with."""
    rollouts = long_rollouts()
    before = None if truth is None else _differences(truth, rollouts)
    state = _state(model)
    batch = pack(rollouts, [1.0] * len(rollouts))
    try:
        logprobs = token_logprobs(model.train(), batch)
        logprobs.sum().backward()
        outcome = _judge(truth, logprobs.detach(), rollouts, model)
    except Exception as error:
        outcome = _refusal(error, (InflightError, ValueError), names)
    model.eval()
    changed = [name for name, value in _state(model).items() if not _same(value, state.get(name))]
    if changed:
        return Outcome(WRONG, f"changes {changed[0]} ({outcome.kind}: {outcome.reason})")
    if truth is None or before is None:
        return outcome
    try:
        after = _differences(truth, rollouts)
    except Exception as error:
        return Outcome(WRONG, f"leaves the model broken: {_line(error)} ({outcome.kind}: {outcome.reason})")
    if not np.allclose(before, after, atol=FP32_BOUND):
        off = np.abs(before - after).max()
        return Outcome(WRONG, f"leaves a model that computes something else: {off:.2g} nats ({outcome.kind})")
    return outcome


def _state(model: PreTrainedModel) -> dict[str, Any]:
    """What scoring must leave as it was: tensors, configuration, and methods of modules."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    methods = {f"forward of {name}": "forward" in vars(module) for name, module in model.named_modules()}
    return tensors | methods | {"the configuration": model.config.to_dict()}


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _judge(
    truth: PreTrainedModel | None, logprobs: torch.Tensor, rollouts: list[Rollout], trained: PreTrainedModel
) -> Outcome:
    """Compare log-probabilities with the truth, and clear the gradients of the model that computed them."""
    if truth is None:
        return Outcome(WRONG, "scores, but is no model in which tokens see those before them and nothing else")
    expected = np.concatenate([_picked(_of_drawn(truth, r), r) for r in rollouts])
    worst = np.abs(logprobs.numpy() - expected).max()
    if not worst <= FP32_BOUND and not worst <= _bound(truth, rollouts):
        return Outcome(WRONG, f"log-probabilities are off by up to {worst:.2g} nats")
    gradients = [p.grad for p in trained.parameters() if p.grad is not None]
    if not gradients or not all(bool(g.isfinite().all()) for g in gradients):
        return Outcome(WRONG, "gradients are not finite" if gradients else "there are no gradients")
    trained.zero_grad(set_to_none=True)
    return Outcome(RIGHT)


# ---- refusals ---------------------------------------------------------------------------------------------------

_RAW = re.compile(
    r"not enough values to unpack|too many values|has no attribute|object is not|out of range|missing \d+ required|"
    r"unexpected keyword|must match|shapes cannot be|NoneType|unsupported operand|'inflight'|inflight_packed|"
    r"expected scalar|size of tensor|invalid for input|is not defined|KeyError|^'[^']*'$|assert",
)
"""What Python and torch say by themselves, which tells a user nothing about their model."""


def _names_of(config: PretrainedConfig) -> set[str]:
    """By which a refusal may call the model: its type, its classes, and those of its parts."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    known = [part for part in parts if isinstance(part, PretrainedConfig)]
    classes = auto_class(config)._model_mapping.get(type(config), ())
    classes = classes if isinstance(classes, tuple) else (classes,)
    return {part.model_type for part in known} | {kind.__name__ for kind in (*map(type, known), *classes)}


def _refusal(error: Exception, kinds: tuple[type[Exception], ...], names: set[str]) -> Outcome:
    """Refused if the error is one that inflight raises on purpose, names the family, and says why in words."""
    message = _line(error)
    said = re.sub(r"\(\w*Error: .*\)", "", message)  # what was raised below may follow in brackets
    if isinstance(error, kinds) and any(name in said for name in names) and not _RAW.search(said):
        return Outcome(REFUSED, message)
    return Outcome(UNNAMED, f"{type(error).__name__}: {message}")


def _line(error: Exception) -> str:
    text = re.sub(r"/tmp/\S+", "…", " ".join(str(error).split()))
    return text[:400] or type(error).__name__
