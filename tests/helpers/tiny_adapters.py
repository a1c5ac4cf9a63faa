"""LoRA adapters over tiny models: made, published, and compared with PEFT."""

import numpy as np
import torch
from full_forward import full_forward_logprobs
from peft import LoraConfig, get_peft_model
from tiny_models import make_model

from inflight.core.messages import SlotReady
from inflight.weights.tensors import slot_views
from inflight.weights.trainer.lora import PeftSource
from inflight.weights.trainer.sources import classify


def with_adapters(
    name: str, *adapters: str, rank: int = 4, targets: object = "all-linear", seed: int = 1, base=make_model, **config
):
    """A PEFT model whose adapters change much. base: makes the model under them by the name of its config."""
    config = LoraConfig(r=rank, lora_alpha=3 * rank, target_modules=targets, task_type="CAUSAL_LM", **config)
    plain = base(name)
    plain.set_attn_implementation("eager")  # which knows soft caps
    model = get_peft_model(plain, config, adapter_name=adapters[0])
    for adapter in adapters[1:]:
        model.add_adapter(adapter, config)
    torch.manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def publish_adapters(engine, model, **changed_at: int) -> None:
    """Into the idle slot of an engine in this process. changed_at: as in SlotReady."""
    slot_table, source = engine.adapter_slots, PeftSource(classify(model))
    source.plan(slot_table.layout)
    slot = slot_table.lend(in_use=engine.slots_in_use.get(slot_table))[0]
    version = max(table.newest_version for table in engine.slot_tables) + 1
    source.fill(slot_views(slot_table.slots[slot].buffer, slot_table.layout), version)
    slot_table.ready(SlotReady(slot, version, slot_table.layout.fingerprint, 0, changed_at=changed_at))


def error(model, rollout, adapter: str | None, summary=np.max) -> float:
    """How far recorded log-probabilities are from those of PEFT."""
    if adapter is None:
        with model.disable_adapter():
            expected = full_forward_logprobs(model, rollout)
    else:
        model.set_adapter(adapter)
        expected = full_forward_logprobs(model, rollout)
    return float(summary(np.abs(expected - rollout.logprobs)))
