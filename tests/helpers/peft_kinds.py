"""Every method of the installed PEFT, and the options of its LoRA, as models to publish."""

import inspect
import warnings
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, XLoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import config as lora_config
from peft.tuners.lora.arrow import create_arrow_model
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.eva import initialize_lora_eva_weights
from peft.tuners.lora.loraga import preprocess_loraga
from tiny_models import make_model

Base = Callable[[str], Any]
"""Makes a base model by the name of its config."""
Kind = Callable[[Base], Any]
TARGETS = ["q_proj", "down_proj"]
TRIED = {"r", "lora_alpha", "target_modules", "corda_config", "lora_ga_config", "arrow_config"}
"""Options of LoraConfig that a kind sets."""
UNTRIED = {
    "eva_config": "with its defaults in `init eva, of inputs`",
    "loftq_config": "of `init loftq`",
    "layers_pattern": "another name for the layers of `layers_to_transform`",
    "runtime_config": "where DoRA begins to be computed",
    "megatron_config": "layers of Megatron",
    "megatron_core": "layers of Megatron",
}
"""Other options, with the reason."""
NEED_CUDA = {"init loftq"}
"""Kinds that PEFT makes by bitsandbytes on a GPU alone."""
_INITIALIZATIONS = ["pissa", "pissa_niter_4", "olora", "OLoRA", "orthogonal", "gaussian", "Gaussian", "mica", "MiCA",
                    "eva", "lora_ga"]  # fmt: skip
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1, "target_modules": None},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "P_TUNING": {"num_virtual_tokens": 4},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "CARTRIDGE": {"num_virtual_tokens": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_tokens_type_mask": [1, 1]},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2, 3]},
    "C3A": {"block_size": 16},
    "VBLORA": {"vector_length": 16, "num_vectors": 8},
}


def _of_method(name: str, config: type) -> Kind:
    def make(base: Base) -> Any:
        arguments = dict(_ARGUMENTS.get(name, {}))
        if "target_modules" in inspect.signature(config).parameters:
            arguments.setdefault("target_modules", TARGETS)
        model = "llama" if name == "ADAPTION_PROMPT" else "qwen3"  # which knows Llama alone
        return get_peft_model(base(model), config(task_type="CAUSAL_LM", **arguments))

    return make


def _of_saved_adapters(base: Base) -> Any:
    """X-LoRA mixes adapters that were saved before."""
    with TemporaryDirectory() as directory:
        _lora()(base).save_pretrained(directory)
        model = base("llama")
        model.config.use_cache = False  # which X-LoRA asks for
        size = model.config.hidden_size
        config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=size, adapters={"0": directory, "1": directory})
        return get_peft_model(model, config)


def _lora_config(**options: Any) -> LoraConfig:
    TRIED.update(options)
    arguments = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | options
    return LoraConfig(**arguments)


def _of_covariances(base: Base) -> Any:
    """CorDA begins with covariances of inputs."""
    model = base("llama")
    config = _lora_config(init_lora_weights="corda", corda_config=lora_config.CordaConfig())
    preprocess_corda(model, config, run_model=lambda: model(_inputs(256)))
    return get_peft_model(model, config)


def _of_gradients(base: Base) -> Any:
    """LoRA-GA begins with gradients."""
    model = base("llama")
    config = _lora_config(init_lora_weights="lora_ga", lora_ga_config=lora_config.LoraGAConfig())
    preprocess_loraga(model, config, lambda: model(_inputs(64), labels=_inputs(64)).loss.backward())
    model.zero_grad()
    return get_peft_model(model, config)


def _of_inputs(model: Any) -> None:
    """EVA begins with singular vectors of inputs. Ranks then differ between layers."""
    batches = [{"input_ids": _inputs(64), "attention_mask": torch.ones(1, 64)} for _ in range(4)]
    initialize_lora_eva_weights(model, batches, show_progress_bar=False)


def _of_routed_adapters(base: Base) -> Any:
    """Arrow chooses between adapters that were saved before."""
    with TemporaryDirectory() as directory:
        paths = [f"{directory}/{seed}" for seed in range(2)]
        for path in paths:
            _lora()(base).save_pretrained(path)
        return create_arrow_model(base("llama"), paths, lora_config.ArrowConfig(top_k=1))


def _quantize_base(model: Any) -> None:
    """Round the base, as LoftQ leaves it."""
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            weight = layer.get_base_layer().weight.data
            step = weight.abs().amax(1, keepdim=True) / 7
            weight.copy_((weight / step).round() * step)
    model.peft_config["default"].init_lora_weights = "loftq"


def _inputs(length: int) -> torch.Tensor:
    return torch.randint(199, (1, length))


def _lora(model: str = "llama", change: Callable[[Any], Any] | None = None, **options: Any) -> Kind:
    TRIED.update(options)

    def make(base: Base) -> Any:
        made = get_peft_model(base(model), _lora_config(**options))
        return made if change is None else change(made) or made

    return make


def _unfreeze_norms(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            parameter.requires_grad_(True)


def _two(model: Any) -> None:
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])


def _halve(model: Any) -> None:
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(0.5)


def _merged_already(model: Any) -> None:
    train(model)
    model.merge_adapter()


METHODS: dict[str, Kind] = {
    kind.value: _of_method(kind.value, config) for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
} | {"XLORA": _of_saved_adapters}
OPTIONS: dict[str, Kind] = {
    "rslora": _lora(use_rslora=True),
    "lora_dropout": _lora(lora_dropout=0.5),
    "layers_to_transform": _lora(layers_to_transform=[1]),
    "exclude_modules": _lora(exclude_modules=["down_proj"]),
    "fan_in_fan_out": _lora(fan_in_fan_out=True),
    "patterns": _lora(alpha_pattern={"layers.0.self_attn.q_proj": 64}, rank_pattern={"layers.1.mlp.down_proj": 2}),
    "dora": _lora(use_dora=True),
    "lora_bias": _lora("qwen2", lora_bias=True, target_modules=["q_proj"]),
    "lora_bias, no bias": _lora(lora_bias=True),
    "bias=all": _lora("qwen2", bias="all"),
    "bias=lora_only": _lora("qwen2", bias="lora_only"),
    "modules_to_save lm_head": _lora(modules_to_save=["lm_head"]),
    "modules_to_save embed_tokens": _lora(modules_to_save=["embed_tokens"]),
    "modules_to_save lm_head, tied": _lora("qwen3", modules_to_save=["lm_head"]),
    "modules_to_save both, tied": _lora("qwen3", modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "token indices": _lora(trainable_token_indices={"embed_tokens": [5, 6, 7]}),
    "token indices, tied": _lora("qwen3", trainable_token_indices={"embed_tokens": [5, 6, 7]}),
    "norms": _lora(change=_unfreeze_norms),
    "embed_tokens": _lora(target_modules=["q_proj", "embed_tokens"]),
    "embed_tokens, scaled": _lora("gemma3", target_modules=["q_proj", "embed_tokens"]),
    "embed_tokens, tied": _lora("qwen3", target_modules=["q_proj", "embed_tokens"]),
    "lm_head": _lora(target_modules=["q_proj", "lm_head"]),
    "lm_head, tied": _lora("qwen3", target_modules=["q_proj", "lm_head"]),
    "both, tied": _lora("qwen3", target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
    "aLoRA": _lora(alora_invocation_tokens=[1, 2]),
    "QALoRA": _lora(use_qalora=True, qalora_group_size=16),
    "BD-LoRA": _lora(
        target_modules=["q_proj", "o_proj"],
        use_bdlora=lora_config.BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["o_proj"], nblocks=2),
    ),
    "VeLoRA": _lora(velora_config={}),
    "KaSA": _lora(kasa_config=lora_config.KasaConfig()),
    "MonteCLoRA": _lora(monteclora_config=lora_config.MontecloraConfig()),
    "target_parameters": _lora("qwen3-moe", target_parameters=["mlp.experts.gate_up_proj"], target_modules=["q_proj"]),
    "layer_replication": _lora(layer_replication=[[0, 2], [1, 3]]),
    "two at once": _lora(change=_two),
    "scaled by hand": _lora(change=_halve),
    "disabled": _lora(change=lambda m: m.base_model.disable_adapter_layers()),
    "merged already": _lora(change=_merged_already),
    "without PeftModel": _lora(change=lambda m: m.base_model.model),
    "init corda": _of_covariances,
    "init lora_ga, of gradients": _of_gradients,
    "init eva, of inputs": _lora(init_lora_weights="eva", change=_of_inputs),
    "init loftq": _lora(init_lora_weights="loftq", loftq_config=lora_config.LoftQConfig(loftq_bits=4)),
    "quantized base": _lora(change=_quantize_base),
    "Arrow": _of_routed_adapters,
} | {f"init {init}": _lora(init_lora_weights=init) for init in (*_INITIALIZATIONS, False)}
KINDS = METHODS | OPTIONS


class NotBuiltError(Exception):
    """PEFT cannot make this kind here."""


def begin(kind: str, base: Base = make_model) -> Any:
    """A model of a kind as PEFT makes it. Raises NotBuiltError with PEFT's reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            return KINDS[kind](base)
        except (ValueError, RuntimeError, AssertionError) as error:
            if kind in NEED_CUDA:
                raise NotBuiltError(f"{kind}: {error}") from error
            raise


def make(kind: str, base: Base = make_model) -> Any:
    """A model of a kind whose trainable parameters have all been moved. Raises NotBuiltError."""
    model = begin(kind, base)
    train(model)
    return model.eval()


def train(model: Any) -> None:
    """Move every parameter that is trained."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
