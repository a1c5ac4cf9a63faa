"""Losses, weights and masks are those of TRL 1.16 and Liger 0.8.5, computed by their own code, and of verl's formulas.

TRL and Liger pad; the same numbers are packed for `loss_of_scores`. Where they do otherwise, a test says how.
"""

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from loss_batches import Case, agree, make_case, ours, pad, padded, sequence_advantages

from inflight.training.objective.corrections import (
    sequence_mask,
    sequence_truncate,
    token_mask,
    token_truncate,
    uncorrected,
    vespo,
)
from inflight.training.objective.objective import Objective
from inflight.training.objective.surrogates import cispo, gspo, ppo_clip, reinforce, sapo
from inflight.training.objective.tokens import DrawnTokens, exp_ratio
from inflight.training.objective.trust_regions import geometric_mask, opsm_mask

MAX_TOKENS = 9
LOW, HIGH, CAP = 0.2, 0.28, 1.8


# TRL


def trl_trainer() -> type:
    pytest.importorskip("trl", reason="the trl extra is not installed")
    from trl import GRPOTrainer

    return GRPOTrainer


def trl_loss(
    case: Case, *, old: str, entropy_coef: float = 0.0, **settings: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPOTrainer._compute_loss of a trainer that has nothing but settings. π_p is the column `old`."""
    trainer_class = trl_trainer()
    logprobs = case.logprobs.clone().requires_grad_()
    mask = pad(case.batch, torch.ones_like(case.logprobs)).long()
    args = SimpleNamespace(
        **settings.pop("temperatures", {}),
        delta=settings.pop("delta", None),
        use_bias_correction_kl=False,
        steps_per_generation=1,
    )
    defaults: dict = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "max_completion_length": MAX_TOKENS,
        "vllm_importance_sampling_mode": None,
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": None,
        "current_gradient_accumulation_steps": 1,
    }
    trainer = SimpleNamespace(
        **defaults | settings,
        args=args,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=entropy_coef != 0,
        entropy_coef=entropy_coef,
        use_adaptive_entropy=False,
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        get_gamma_weights=trainer_class.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            pad(case.batch, logprobs),
            pad(case.batch, case.entropies),
            None,
        ),
    )
    trainer.accelerator.sync_gradients = False
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = trainer.vllm_importance_sampling_mode is not None
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": sequence_advantages(case),
        "old_per_token_logps": padded(case, old),
        "sampling_per_token_logps": padded(case, "behavior_logprobs"),
        "ref_per_token_logps": padded(case, "reference_logprobs"),
        "num_items_in_batch": mask.sum().double(),
    }
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = trl_weights(
            trainer, inputs["old_per_token_logps"], inputs["sampling_per_token_logps"], mask
        )
    loss = trainer_class._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach(), logprobs.grad


def trl_weights(trainer: object, old: torch.Tensor, sampling: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """TRL's weights for vLLM's tokens, f64[B, T] or f64[B, 1].

    They are computed in the midst of a method that generates and scores, so its `if` that does so is run by itself.
    """
    method = trl_trainer()._generate_and_score_completions
    blocks = [
        node
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method))))
        if isinstance(node, ast.If)
        and "vllm_importance_sampling_ratio = torch.exp(logps_diff)" in map(ast.unparse, node.body)
    ]
    assert len(blocks) == 1
    names = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampling,
        "completion_mask": mask,
        "tool_mask": None,
    }
    exec(compile(ast.Module(blocks, []), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"]


AGGREGATION_OF = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", AGGREGATION_OF)
def test_trl_loss_types_are_clipped_surrogates_with_an_aggregation(loss_type, seed):
    case = make_case(seed)
    objective = Objective(
        correction=uncorrected,
        surrogate=partial(ppo_clip, low=LOW, high=HIGH),
        proximal="behavior",
        aggregation=AGGREGATION_OF[loss_type],
        max_tokens=MAX_TOKENS,
        kl_weight=0.04,
        kl_correction=False,
    )
    assert agree(ours(objective, case), trl_loss(case, old="behavior_logprobs", loss_type=loss_type, beta=0.04))


def test_trl_delta_is_the_dual_clip():
    case = make_case(0)
    objective = Objective(
        correction=uncorrected, surrogate=partial(ppo_clip, low=LOW, high=HIGH, dual=1.5), proximal="behavior"
    )
    expected = trl_loss(case, old="behavior_logprobs", loss_type="dapo", delta=1.5)
    assert agree(ours(objective, case), expected)
    assert not agree(expected, trl_loss(case, old="behavior_logprobs", loss_type="dapo"))


def test_trl_cispo_is_cispo():
    case = make_case(0)
    objective = Objective(correction=uncorrected, surrogate=partial(cispo, cap=1.5), proximal="behavior")
    assert agree(ours(objective, case), trl_loss(case, old="behavior_logprobs", loss_type="cispo", epsilon_high=1.5))


@pytest.mark.parametrize("seed", range(3))
def test_trl_vespo_is_vespo(seed):
    case = make_case(seed)
    powers = {"positive": (1.5, 2.5), "negative": (2.0, 1.0)}
    objective = Objective(correction=partial(vespo, **powers), surrogate=reinforce, proximal="current")
    settings = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0}
    expected = trl_loss(case, old="behavior_logprobs", loss_type="vespo", temperatures=settings)
    assert agree(ours(objective, case), expected)
    assert not agree(expected, ours(replace(objective, correction=vespo), case))


def test_sapo_of_trl_and_liger_is_sapo():
    case = make_case(0)
    surrogate = partial(sapo, positive=1.5, negative=0.7)
    common = {"correction": uncorrected, "proximal": "behavior", "kl_weight": 0.04, "kl_correction": False}
    settings = {"old": "behavior_logprobs", "loss_type": "sapo", "beta": 0.04}
    temperatures = {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 0.7}
    expected = ours(Objective(surrogate=surrogate, aggregation="sequence", **common), case)
    assert agree(expected, trl_loss(case, **settings, temperatures=temperatures))
    assert agree(expected, liger_loss(case, **settings, **temperatures))
    assert not agree(expected, ours(Objective(surrogate=sapo, aggregation="sequence", **common), case))


@pytest.mark.parametrize("bounds", [(3e-4, 4e-4), (0.1, 0.2)])
def test_trl_sequence_level_is_gspo(bounds):
    case = make_case(0)
    low, high = bounds
    objective = Objective(
        correction=uncorrected,
        surrogate=partial(gspo, low=low, high=high),
        proximal="behavior",
        aggregation="sequence",
    )
    expected = trl_loss(
        case,
        old="behavior_logprobs",
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon_low=low,
        epsilon_high=high,
    )
    assert agree(ours(objective, case), expected)


def test_trl_off_policy_mask_is_opsm():
    case = make_case(0)
    for delta in (1e-4, 0.1):
        objective = Objective(
            correction=uncorrected,
            surrogate=partial(ppo_clip, low=LOW, high=HIGH),
            trust_regions=(partial(opsm_mask, delta=delta),),
            proximal="recomputed",
        )
        settings = {"old": "proximal_logprobs", "loss_type": "dapo"}
        expected = trl_loss(case, off_policy_mask_threshold=delta, **settings)
        assert agree(ours(objective, case), expected)
        assert not agree(expected, trl_loss(case, **settings))


TRL_CORRECTIONS = {
    "token_truncate": [(token_truncate, {"cap": CAP}), (token_truncate, {"cap": CAP, "floor": 0.6})],
    "token_mask": [(token_mask, {"low": 0.0, "high": CAP}), (token_mask, {"low": 0.6, "high": CAP})],
    "sequence_truncate": [(sequence_truncate, {"cap": CAP}), (sequence_truncate, {"cap": CAP, "floor": 0.6})],
    "sequence_mask": [(sequence_mask, {"low": 0.0, "high": 3.0}), (sequence_mask, {"low": 0.6, "high": CAP})],
}


@pytest.mark.parametrize("case_of_mode", range(2))
@pytest.mark.parametrize("mode", TRL_CORRECTIONS)
def test_trl_modes_of_importance_sampling_are_corrections_of_a_recomputed_proximal_policy(mode, case_of_mode):
    case = make_case(1)
    correction, bounds = TRL_CORRECTIONS[mode][case_of_mode]
    objective = Objective(
        correction=partial(correction, **bounds),
        surrogate=partial(ppo_clip, low=LOW, high=HIGH),
        proximal="recomputed",
        aggregation="sequence",
        kl_weight=0.04,
        kl_correction=False,
    )
    expected = trl_loss(
        case,
        old="proximal_logprobs",
        loss_type="grpo",
        beta=0.04,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=bounds.get("low", bounds.get("floor")),
        vllm_importance_sampling_clip_max=bounds.get("high", bounds.get("cap")),
    )
    assert agree(ours(objective, case), expected)
    assert not agree(ours(replace(objective, correction=uncorrected), case), expected)


def test_trl_weighs_entropy_by_token_whatever_the_loss_type():
    """Ours is aggregated as the losses are, so the two agree where these are averaged over tokens."""
    case = make_case(0)
    objective = Objective(
        correction=uncorrected,
        surrogate=partial(ppo_clip, low=LOW, high=HIGH),
        proximal="behavior",
        entropy_weight=0.05,
    )
    settings = {"old": "behavior_logprobs", "entropy_coef": 0.05}
    assert agree(ours(objective, case), trl_loss(case, loss_type="dapo", **settings))
    by_sequence = replace(objective, aggregation="sequence")
    theirs = trl_loss(case, loss_type="grpo", **settings)
    without_bonus, _ = ours(replace(by_sequence, entropy_weight=0.0), case)
    assert theirs[0].item() == pytest.approx((without_bonus - 0.05 * case.entropies.mean()).item(), rel=1e-6)
    assert not agree(ours(by_sequence, case), theirs)


# Liger


def liger_loss(case: Case, *, old: str, **settings: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch code that Liger's fused loss differentiates, chunk by chunk; here in one chunk."""
    grpo_loss = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss", reason="liger-kernel is not installed")
    logprobs = case.logprobs.clone().requires_grad_()
    mask = pad(case.batch, torch.ones_like(case.logprobs))
    loss, _ = grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        pad(case.batch, logprobs),
        mask,
        sequence_advantages(case),
        mask,
        ref_per_token_logps=padded(case, "reference_logprobs"),
        old_per_token_logps=padded(case, old),
        max_completion_length=MAX_TOKENS,
        **{"epsilon_low": LOW, "epsilon_high": HIGH, "beta": 0.04} | settings,
    )
    loss.backward()
    return loss.detach(), logprobs.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", AGGREGATION_OF)
def test_liger_loss_types_are_clipped_surrogates_with_an_aggregation(loss_type, seed):
    case = make_case(seed)
    objective = Objective(
        correction=uncorrected,
        surrogate=partial(ppo_clip, low=LOW, high=HIGH, dual=2.0),
        proximal="behavior",
        aggregation=AGGREGATION_OF[loss_type],
        max_tokens=MAX_TOKENS,
        kl_weight=0.04,
        kl_correction=False,
    )
    assert agree(ours(objective, case), liger_loss(case, old="behavior_logprobs", loss_type=loss_type, delta=2.0))


def test_liger_cispo_and_gspo_are_cispo_and_gspo():
    case = make_case(1)
    common = {"correction": uncorrected, "proximal": "behavior", "kl_weight": 0.04, "kl_correction": False}
    assert agree(
        ours(Objective(surrogate=partial(cispo, cap=1.5), **common), case),
        liger_loss(case, old="behavior_logprobs", loss_type="cispo", epsilon_high=1.5),
    )
    assert agree(
        ours(Objective(surrogate=partial(gspo, low=0.1, high=0.2), aggregation="sequence", **common), case),
        liger_loss(
            case,
            old="behavior_logprobs",
            loss_type="grpo",
            importance_sampling_level="sequence",
            epsilon_low=0.1,
            epsilon_high=0.2,
        ),
    )


@pytest.mark.parametrize("correction", [token_truncate, sequence_truncate, token_mask, sequence_mask])
def test_liger_multiplies_with_the_weights_that_it_is_given(correction):
    case = make_case(2)
    weights = pad(case.batch, correction(case.tokens()))
    objective = Objective(
        correction=correction,
        surrogate=partial(ppo_clip, low=LOW, high=HIGH),
        proximal="recomputed",
        kl_weight=0.04,
        kl_correction=False,
    )
    assert agree(
        ours(objective, case), liger_loss(case, old="proximal_logprobs", loss_type="dapo", vllm_is_ratio=weights)
    )


# verl: rollout correction, restated from its documentation; one padded sequence at a time.

SAFETY_BOUND = 20.0


def verl_is_weights(log_ratio: torch.Tensor, mask: torch.Tensor, level: str, threshold: str) -> torch.Tensor:
    """`rollout_is` and `rollout_is_threshold`: "2.0" truncates, "0.5_5.0" leaves out (IcePop)."""
    rows = torch.zeros_like(log_ratio)
    for b in range(len(log_ratio)):
        valid = mask[b]
        logs = log_ratio[b, valid]
        if level == "sequence":
            logs = logs.sum().expand(len(logs))
        ratios = logs.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
        bounds = [float(part) for part in threshold.split("_")]
        if len(bounds) == 1:
            ratios = ratios.clamp(max=bounds[0])
        else:
            ratios = ratios * ((ratios >= bounds[0]) & (ratios <= bounds[1]))
        rows[b, valid] = ratios
    return rows


def verl_rs_mask(log_ratio: torch.Tensor, mask: torch.Tensor, kind: str, threshold: str) -> torch.Tensor:
    """`rollout_rs` and `rollout_rs_threshold`. k1 = −log w has bounds "lo_hi" on its exponential, so on 1 / w."""
    level, k = kind.rsplit("_", 1)
    kept = torch.zeros_like(mask)
    for b in range(len(log_ratio)):
        valid = mask[b]
        logs = log_ratio[b, valid].clamp(-SAFETY_BOUND, SAFETY_BOUND)
        values = {"k1": -logs, "k2": logs**2 / 2, "k3": logs.exp() - 1 - logs}[k]
        if level != "token" and len(values):
            reduced = {"seq_sum": values.sum(), "seq_mean": values.mean(), "seq_max": values.max()}[level]
            values = reduced.expand(len(values))
        if k == "k1":
            low, high = (math.log(float(part)) for part in threshold.split("_"))
            kept[b, valid] = (values >= low) & (values <= high)
        else:
            kept[b, valid] = values <= float(threshold)
    return kept


def verl_inputs(case: Case) -> tuple[DrawnTokens, torch.Tensor, torch.Tensor]:
    tokens = case.tokens()
    return tokens, pad(case.batch, tokens.log_weights), pad(case.batch, torch.ones_like(tokens.behavior)) > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("level", "threshold", "correction"),
    [
        ("token", "2.0", token_truncate),
        ("sequence", "2.0", sequence_truncate),
        ("sequence", "5.0", partial(sequence_truncate, cap=5.0)),
        ("token", "0.5_5.0", token_mask),
        ("sequence", "0.5_2.0", sequence_mask),
    ],
)
def test_verl_rollout_is_is_a_correction(level, threshold, correction, seed):
    case = make_case(seed)
    tokens, log_ratio, mask = verl_inputs(case)
    expected = verl_is_weights(log_ratio, mask, level, threshold)
    assert torch.allclose(pad(case.batch, correction(tokens)), expected, rtol=1e-12)
    assert not torch.allclose(expected[mask], log_ratio[mask].exp())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "threshold", "region"),
    [
        # verl's bounds are on π_b / π_p, ours on π_p / π_b
        ("seq_mean_k1", "0.999_1.002", partial(geometric_mask, low=1 / 1.002, high=1 / 0.999)),
        ("seq_mean_k1", "0.99_1.01", partial(geometric_mask, low=1 / 1.01, high=1 / 0.99)),
        ("seq_sum_k1", "0.5_4.0", lambda tokens: sequence_mask(tokens, low=0.25, high=2.0) > 0),
        ("token_k1", "0.5_4.0", lambda tokens: token_mask(tokens, low=0.25, high=2.0) > 0),
        # and functions of one's own take the rest
        ("token_k2", "0.01", lambda tokens: tokens.log_weights.square() / 2 <= 0.01),
        ("token_k3", "0.01", lambda tokens: exp_ratio(tokens.log_weights) - 1 - tokens.log_weights <= 0.01),
        (
            "seq_mean_k3",
            "0.01",
            lambda tokens: (tokens.sequence_means(exp_ratio(tokens.log_weights) - 1 - tokens.log_weights) <= 0.01)[
                tokens.sequences
            ],
        ),
    ],
)
def test_verl_rollout_rs_is_a_trust_region(kind, threshold, region, seed):
    case = make_case(seed)
    tokens, log_ratio, mask = verl_inputs(case)
    expected = verl_rs_mask(log_ratio, mask, kind, threshold)
    assert (pad(case.batch, region(tokens)) & mask).tolist() == expected.tolist()
    assert 0 < expected.sum() < mask.sum()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_decoupled_objective_is_ours(level):
    """−min(w, C) · min(uA, clip(u)A), averaged over the tokens."""
    case = make_case(0)
    _, log_ratio, mask = verl_inputs(case)
    logprobs = case.logprobs.clone().requires_grad_()
    u = (pad(case.batch, logprobs) - padded(case, "proximal_logprobs")).exp()
    advantages = padded(case, "advantages")
    gains = torch.minimum(u * advantages, u.clamp(1 - LOW, 1 + HIGH) * advantages)
    loss = -(verl_is_weights(log_ratio, mask, level, "2.0") * gains)[mask].mean()
    loss.backward()
    objective = Objective(
        correction={"token": token_truncate, "sequence": sequence_truncate}[level],
        surrogate=partial(ppo_clip, low=LOW, high=HIGH),
        proximal="recomputed",
    )
    assert agree(ours(objective, case), (loss.detach(), logprobs.grad))


def test_verl_bypass_with_reinforce_is_tis():
    case = make_case(0)
    logprobs = case.logprobs.clone().requires_grad_()
    log_ratio = pad(case.batch, case.logprobs) - padded(case, "behavior_logprobs")
    mask = pad(case.batch, torch.ones_like(case.logprobs)) > 0
    weights = verl_is_weights(log_ratio, mask, "token", "2.0")
    loss = -(weights * padded(case, "advantages") * pad(case.batch, logprobs))[mask].mean()
    loss.backward()
    assert agree(ours(Objective(surrogate=reinforce, proximal="current"), case), (loss.detach(), logprobs.grad))


def test_verl_averages_over_the_tokens_that_rejection_leaves_and_we_over_all():
    """verl takes rejected tokens out of the response mask, so that those that stay weigh more."""
    case = make_case(0)
    tokens, log_ratio, mask = verl_inputs(case)
    region = partial(geometric_mask, low=1 / 1.01, high=1 / 0.99)
    kept = verl_rs_mask(log_ratio, mask, "seq_mean_k1", "0.99_1.01")
    theirs = -(verl_is_weights(log_ratio, mask, "token", "2.0") * padded(case, "advantages"))[kept].mean()
    objective = Objective(
        surrogate=partial(ppo_clip, low=1.0, high=math.inf), trust_regions=(region,), proximal="recomputed"
    )
    at_proximal = replace(case, logprobs=tokens.proximal)  # u = 1
    loss, _ = ours(objective, at_proximal)
    assert loss.item() == pytest.approx((theirs * kept.sum() / mask.sum()).item(), rel=1e-6)
    assert kept.sum() < 0.7 * mask.sum()
