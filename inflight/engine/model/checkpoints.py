"""Loads checkpoints by Transformers, and refuses checkpoints whose tensors do not match the model.

Transformers gives random values to tensors that a checkpoint lacks, and ignores tensors that the model lacks. Here the
first is an error, and so is the second if it would change the model's output: a bias, scale or adapter in a layer that
the model has, or a layer beyond the last one. Parts of other models (vision towers, layers for multi-token prediction,
value heads) are ignored with a warning. Attention masks in old checkpoints are ignored, too.
"""

import copy
import inspect
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from inflight.core.errors import ModelLoadError
from inflight.core.text import listed
from inflight.engine.model.fp8_blocks import whole_blocks
from inflight.weights.tensor_names import ModuleTree, unwrapped

logger = logging.getLogger("inflight.engine")

_OF_QUANTIZATION = re.compile(r"(scale|scales|scale_inv|zero_point|zeros|amax)$")
"""Names of tensors that only kernels for quantised weights read."""
_SCALE = re.compile(r"(_scale_inv|_scale|\.scale|\.qscale_weight)$")
"""Suffix of a scale's name after the name of its tensor, with or without `.weight`."""


def load_checkpoint(model: str, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Load a language model with all of its weights, by the class of `auto_class`. options: of `from_pretrained`.

    Weights that Transformers can dequantise are dequantised, on every device: their layout is the layout of a trainer
    without quantised weights. Raises ModelLoadError if the checkpoint does not fit the model or its quantisation is
    unknown, and the exceptions of `from_pretrained`."""
    quantised = _quantisation(config)
    method = quantised.get("quant_method")
    if quantised and not AutoHfQuantizer.supports_quant_method(quantised):
        raise ModelLoadError(
            f"the weights of the checkpoint {model!r} are quantised by {method!r}, which Transformers does not read. "
            "It would load their codes as weights. Use a checkpoint in bf16, or of another method of quantisation."
        )
    if adapter := find_adapter_config_file(model):
        raise ModelLoadError(
            f"the checkpoint {model!r} has {Path(adapter).name}: Transformers would add this adapter to the weights, "
            "also to weights into which it was merged. To draw with the adapter, launch its base model with lora_rank "
            "and publish it. If the adapter was merged, remove its files."
        )
    with _ConversionErrors() as broken, whole_blocks() if method == "fp8" else nullcontext():
        try:
            result: Any = auto_class(config).from_pretrained(
                model,
                config=_dequantised(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **options,
            )
        except RuntimeError as error:
            if not broken.names:
                raise
            raise ModelLoadError(
                f"the checkpoint {model!r} does not fit {model_class(config)}: of {_listed('tensor', broken.names)} a "
                "part is missing or has another shape. Save or download the checkpoint again with all of its files."
            ) from error
    loaded, info = result
    if method == "fp8" and (unscaled := _unscaled(model)):
        raise ModelLoadError(
            f"the checkpoint {model!r} lacks the scales of {_listed('quantised tensor', unscaled)}. Save or download "
            "it again with all of its files."
        )
    _check_names(model, loaded, info, quantised=bool(quantised))
    return loaded


def compare_checkpoint(model: str, config: PretrainedConfig, *, trust: bool) -> None:
    """Raise ModelLoadError if a checkpoint that another library loads lacks tensors of the model. Values are read only
    without accelerate, and then mapped; checkpoints that Transformers cannot read are not compared."""
    if _quantisation(config):
        return
    options = {"device_map": "meta"} if find_spec("accelerate") else {}
    try:
        load_checkpoint(model, config, dtype="auto", trust_remote_code=trust, **options)
    except ModelLoadError:
        raise
    except Exception as error:  # a model that the other library reads in another way
        logger.info("the names of the tensors of %s are not compared with the model's names: %r", model, error)


def _check_names(checkpoint: str, model: PreTrainedModel, info: dict[str, Any], *, quantised: bool) -> None:
    """Raise ModelLoadError unless a checkpoint has all tensors of a model and no other tensor for the model's layers.
    info: loading info of Transformers, in which the names that it ignores are left out."""
    shapes = {name: f"{name}: {list(theirs)} instead of {list(ours)}" for name, theirs, ours in info["mismatched_keys"]}
    missing = set(info["missing_keys"]) - shapes.keys()
    unexpected = {name for name in info["unexpected_keys"] if not (quantised and _OF_QUANTIZATION.search(name))}
    tree = ModuleTree(model.state_dict())
    if missing or shapes:
        faults = []
        if missing:
            faults.append(f"it lacks {_listed('tensor', missing)}")
        if shapes:
            faults.append(f"the shape is another in {_listed('tensor', shapes.values())}")
        if unexpected:
            faults.append(f"the model has no place for {_listed('tensor', unexpected)}")
        advice = _explanation(missing, unexpected) or (
            "Save or download the checkpoint again with all of its files, or correct config.json"
        )
    elif beyond := tree.beyond_the_last_layer(unexpected):
        faults = [f"the model would ignore {_listed('tensor', beyond)} in layers beyond its last one"]
        advice = "Correct num_hidden_layers in config.json, or remove these tensors"
    elif strange := [name for name in unexpected if tree.has_place_for(name)]:
        faults = [f"the model would ignore {_listed('tensor', strange)} in parts that it has"]
        advice = (
            "Merge the adapters into the weights, then save them"
            if any("lora_" in name for name in strange)
            else "Correct config.json, which can switch off a bias or a norm, or remove these tensors"
        )
    else:
        if unexpected:
            logger.warning("the model does not use %s of %s", _listed("tensor", unexpected), checkpoint)
        return
    name = type(model).__name__
    raise ModelLoadError(f"the checkpoint {checkpoint!r} does not fit {name}: {'; '.join(faults)}. {advice}.")


_AUTO_CLASSES: list[tuple[Any, Any]] = [
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
]
"""Transformers' classes that load language models, with their models by config. The first that has a model is used."""


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class of Transformers that loads checkpoints with this config as language models:
    AutoModelForCausalLM, or another one for multimodal models. None if Transformers lacks one."""
    if brings_its_model(config):
        return AutoModelForCausalLM
    return next((auto for auto, models in _AUTO_CLASSES if type(config) in models), None)


def model_class(config: PretrainedConfig) -> str:
    """Return the name of the class of language models that Transformers makes of a config."""
    if brings_its_model(config):
        return config.auto_map["AutoModelForCausalLM"]
    found: Any = next((models[type(config)] for _, models in _AUTO_CLASSES if type(config) in models), type(config))
    return (found[0] if isinstance(found, tuple) else found).__name__


def brings_its_model(config: PretrainedConfig) -> bool:
    """Return True if the class of a config is code of the model's repository. The class of the model is then, too."""
    return type(config).__module__.startswith("transformers_modules.") and "AutoModelForCausalLM" in config.auto_map


def _quantisation(config: PretrainedConfig) -> dict[str, Any]:
    """Return the quantisation of a checkpoint's weights, from its config.json or the text config there, or {}."""
    configs = (config, config.get_text_config(decoder=True))
    return next((found for one in configs if (found := getattr(one, "quantization_config", None))), {})


def _dequantised(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config, which requests dequantised weights if Transformers can dequantise the checkpoint's."""
    quantised = _quantisation(config)
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(quantised.get("quant_method", ""))
    if kind is None or "dequantize" not in inspect.signature(kind).parameters:
        return config
    config = copy.deepcopy(config)
    config.quantization_config = quantised | {"dequantize": True}
    return config


def _unscaled(model: str) -> list[str]:
    """Return the names of 8-bit floats without a scale in safetensors files. Transformers would scale them by 1."""
    config = cached_file(model, CONFIG_NAME)
    names: set[str] = set()
    floats: list[str] = []
    for path in Path(config).parent.glob("*.safetensors") if config else ():
        with safe_open(path, "pt") as opened:
            here = list(opened.keys())
            names.update(here)
            floats += [name for name in here if opened.get_slice(name).get_dtype().startswith("F8_E4M3")]
    owners = {_SCALE.sub("", name) for name in names if _SCALE.search(name)}
    return [name for name in floats if name not in owners and name.removesuffix(".weight") not in owners]


def _explanation(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Return advice if the names of checkpoint and model differ by a prefix or by a wrapper; else ""."""
    wrappers = Counter(
        part
        for name in unexpected
        if (plain := unwrapped(name)) in missing
        for part in set(name.split(".")) - set(plain.split("."))
    )
    if wrapper := _of_most(wrappers, unexpected):
        return (
            f'The names contain "{wrapper}.", which a wrapper (torch.compile, DistributedDataParallel, FSDP) adds: '
            "save the model inside the wrapper, or remove this part from the names"
        )
    if prefix := _prefix(missing, unexpected):
        return f'The names begin with "{prefix}", unlike the names of the model: remove this prefix'
    if prefix := _prefix(unexpected, missing):
        return f'The names lack "{prefix}", the prefix of the names of the model: add it'
    return ""


def _prefix(short: Collection[str], long: Collection[str]) -> str:
    """Return the prefix that makes most of the names in `short` names of `long`, or ""."""
    found = Counter(
        name[: dot + 1]
        for name in long
        for dot, letter in enumerate(name)
        if letter == "." and name[dot + 1 :] in short
    )
    return _of_most(found, short)


def _of_most(found: Counter[str], names: Collection[str]) -> str:
    """Return the text that was found in more than half of the names, or ""."""
    return next((text for text, count in found.most_common(1) if count * 2 > len(names)), "")


def _listed(noun: str, names: Iterable[str]) -> str:
    names = sorted(names)
    return f"{len(names)} {noun}{'s' * (len(names) != 1)} ({listed(names)})"


class _ConversionErrors(logging.Handler):
    """Collects the names of tensors that Transformers could not convert. Its exception does not have them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._logger = logging.getLogger("transformers.modeling_utils")

    def emit(self, record: logging.LogRecord) -> None:
        text = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage())
        self.names += re.findall(r"^(.*\S) +\| CONVERSION", text, flags=re.MULTILINE)

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
