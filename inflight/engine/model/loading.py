"""Loads a Transformers model by name, with our attention, and makes one module per slot."""

import copy
import logging
import os
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from inflight.core.errors import ModelLoadError, RemoteCodeError, UnsupportedModelError
from inflight.core.layout import WeightLayout
from inflight.core.options import DEFAULT_MAX_CONTEXT
from inflight.core.text import first_line
from inflight.engine.cache.classify import OUR_KINDS, check_layer_types
from inflight.engine.cache.kinds import LayerKind
from inflight.engine.model.attention.hook import ATTENTION_NAME
from inflight.engine.model.checkpoints import auto_class, load_checkpoint, model_class
from inflight.engine.model.experts import EXPERTS_NAME
from inflight.engine.model.shapes import SHAPES, byte_tokenizer, shape_config
from inflight.model_checks.lengths import length_limit, row_limit
from inflight.weights.tensors import published_tensors, slot_views

logger = logging.getLogger("inflight.engine")

_MEDIA = re.compile(
    r"((^|_)(image|img|video|audio|speech|boi|boa)_token_(id|index)|^image_patch_id|^visual_indicator_token_ids)$"
)
"""Names in configs of tokens in place of images, videos and sound, or before them."""

_TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
"""Names of files of tokenizers. A model with one of them has a tokenizer."""

_CONTEXTS = ("max_position_embeddings", "max_target_positions", "max_seq_len")
"""Names in configs of the number of positions. The first one that a config has is used."""


def resolve_dtype(name: str, *, model: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of the weights. "auto" is bf16 on a GPU and fp32 on a CPU for a built-in shape, and None, the
    checkpoint's own dtype, for other models."""
    if name != "auto":
        return getattr(torch, name)
    if model in SHAPES:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return None


def load_config(model: str, *, trust: bool = False, kinds: Sequence[LayerKind] = OUR_KINDS) -> PretrainedConfig:
    """Return the config of `read_config`. Raises UnsupportedModelError also for layers of no kind. kinds: as for
    `classify_layers`."""
    config = read_config(model, trust=trust)
    check_layer_types(config.get_text_config(), kinds)
    return config


def read_config(model: str, *, trust: bool = False) -> PretrainedConfig:
    """Return the config of a built-in shape, a directory or a hub id. Raises ModelLoadError or UnsupportedModelError.

    trust: run code from the model's repository, here and in the other functions with this argument. If such code is
    needed and not trusted, RemoteCodeError is raised.
    """
    if model in SHAPES:
        return shape_config(model)
    expected = (
        f"expected a directory with config.json, a Hugging Face hub id, or a built-in shape ({', '.join(SHAPES)})"
    )
    # Otherwise the error would be the hub's, about the form of its ids.
    if model.startswith(("/", ".", "~")) and not os.path.isdir(model):
        raise ModelLoadError(f"cannot load model {model!r}: there is no such directory; {expected}")
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust)
    except Exception as error:  # a malformed config.json, or code of a repository, can raise anything
        _refuse_remote_code(model, error)
        raise ModelLoadError(f"cannot load model {model!r}: {first_line(error)}; {expected}") from error
    refuse_other_models(config)
    try:
        config.get_text_config()
    except ValueError as error:  # the config has several text configs
        raise UnsupportedModelError(
            f"{config.model_type} is not made for text alone: {first_line(error)}; the engine runs decoders of text"
        ) from error
    return config


def _refuse_remote_code(model: str, error: Exception) -> None:
    """Raise RemoteCodeError if Transformers' error is about untrusted code."""
    if "trust_remote_code" in str(error):
        raise RemoteCodeError(
            f"model {model!r} consists of code of its repository, which inflight does not run by itself; read that "
            "code, and launch with trust_remote_code=True if you trust it with all that this user may do"
        ) from error


def refuse_other_models(config: PretrainedConfig) -> None:
    """Raise UnsupportedModelError if Transformers has no language model for this kind of configuration, or an encoder
    with a decoder, and no code of such a model was loaded with it."""
    auto = auto_class(config)
    if auto is AutoModelForCausalLM or (auto is not None and not config.is_encoder_decoder):
        return
    reason = f"no causal language model: Transformers' AutoModelForCausalLM does not take {type(config).__name__}"
    if getattr(config, "is_encoder_decoder", False):
        reason = "an encoder and a decoder; the engine runs decoders alone"
    elif getattr(config, "text_config", None) is not None:
        reason = f"multimodal, and Transformers has no class that loads {type(config).__name__} as a language model"
    raise UnsupportedModelError(f"{config.model_type} is {reason}")


def context_limit(config: PretrainedConfig, asked: int, *, sparse: bool = False) -> int:
    """Return the maximum number of tokens of a sequence: the requested number (0: at most 4096), within the model's
    context and within `length_limit`. A request beyond the model's context is lowered with a warning, one beyond
    `length_limit` raises UnsupportedModelError. sparse: as for `length_limit`."""
    known = next((int(found) for name in _CONTEXTS if (found := getattr(config, name, None))), None)
    limit = known or DEFAULT_MAX_CONTEXT
    length, cause = length_limit(config, sparse=sparse) or (limit, "")
    if cause and asked > length:
        raise UnsupportedModelError(
            f"{config.model_type} uses {cause}, which the engine can run up to {length} tokens; max_context is "
            f"{asked}; set max_context={length} or less"
        )
    if asked > limit:
        why = "the model's context in config.json" if known else "the limit for a model whose config names none"
        logger.warning("max_context=%d is lowered to %d, %s", asked, limit, why)
    return min(limit, length, asked or DEFAULT_MAX_CONTEXT)


def prefill_limit(config: PretrainedConfig, asked: int, max_sequences: int) -> int:
    """Return the number of prompt tokens in one pass: the requested number, within the number that the model takes in a
    row (`row_limit`). Raises UnsupportedModelError if the drawn tokens alone fill the row."""
    row = row_limit(config)
    if row is None:
        return asked
    if row[0] <= max_sequences:
        raise UnsupportedModelError(
            f"{config.model_type} has {row[1]}, so that a pass may have {row[0]} tokens; lower max_sequences, which is "
            f"{max_sequences}, below that"
        )
    return min(asked, row[0] - max_sequences)


def load_model(
    model: str,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    seed: int,
    trust: bool = False,
    kinds: Sequence[LayerKind] = OUR_KINDS,
) -> PreTrainedModel:
    """Return the model with its weights, in eval mode. dtype: None is the checkpoint's own dtype. kinds: as for
    `load_config`. Raises ModelLoadError or UnsupportedModelError."""
    config = load_config(model, trust=trust, kinds=kinds)
    try:
        if model in SHAPES:
            torch.manual_seed(seed)
            with torch.device(device):
                loaded = AutoModelForCausalLM.from_config(
                    config, dtype=dtype or torch.float32, attn_implementation=ATTENTION_NAME
                )
        else:
            loaded = load_checkpoint(
                model, config, dtype=dtype or "auto", attn_implementation=ATTENTION_NAME, trust_remote_code=trust
            )
            nn.Module.to(loaded, device)
    except ModelLoadError:
        raise
    except Exception as error:  # the caller gets the same error, whatever the libraries below raise
        _refuse_remote_code(model, error)
        if ATTENTION_NAME in str(error):  # the family's code looked the name up among the attentions that it supports
            raise UnsupportedModelError(
                f"{model_class(config)} does not take its attention from Transformers' attention interface, through "
                "which the engine runs it"
            ) from error
        raise ModelLoadError(f"cannot load model {model!r} ({model_class(config)}): {first_line(error)}") from error
    if device.type == "cpu":
        loaded.config._experts_implementation = EXPERTS_NAME
    return loaded.eval().requires_grad_(False)


def load_tokenizer(model: str, *, trust: bool = False) -> PreTrainedTokenizerBase | None:
    """Return the model's tokenizer, or None if it has no file of one, or consists of code that is not trusted. Raises
    ModelLoadError if a tokenizer has files and cannot be loaded."""
    if model in SHAPES:
        return byte_tokenizer()
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if not any(cached_file(model, name, **quiet) for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust)
    except Exception as error:  # damaged files make Transformers raise anything
        if "trust_remote_code" in str(error):
            logger.warning("the tokenizer of %s is code of its repository, which is not run: it has none", model)
            return None
        raise ModelLoadError(
            f"cannot load the tokenizer of {model!r}: {first_line(error)}; save or download its files again, or remove "
            "them to generate without text"
        ) from error


def module_over(model: PreTrainedModel, layout: WeightLayout, buffer: torch.Tensor) -> PreTrainedModel:
    """Return a module whose parameters are views of a slot's u8[total_bytes] and whose other buffers are the buffers of
    `model`. Nothing is copied: deepcopy gets the views as the copies of the parameters."""
    views = slot_views(buffer, layout)
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for name, tensor in published_tensors(model).items():
        view = views[name]
        memo[id(tensor)] = nn.Parameter(view, requires_grad=False) if isinstance(tensor, nn.Parameter) else view
    return copy.deepcopy(model, memo)


def eos_token_ids(
    *configs: GenerationConfig | PretrainedConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
) -> frozenset[int]:
    """Return the end-of-sequence ids of the first of these configs that has some, and of the tokenizer: a chat template
    can end turns with a token that a base model's config does not name. The generation config precedes the model's
    config. Ids that the model's vocabulary lacks are left out with a warning."""
    found: frozenset[int] = frozenset()
    for config in configs:
        if (ids := getattr(config, "eos_token_id", None)) is not None:
            listed_ids = ids if isinstance(ids, (list, tuple, set)) else [ids]
            if not all(isinstance(token, int) for token in listed_ids):
                raise ModelLoadError(
                    f"eos_token_id is {ids!r} in {type(config).__name__}; it must be a token id or a list of token ids"
                )
            found = frozenset(listed_ids)
            break
    own = getattr(tokenizer, "eos_token_id", None)
    if own is not None and own not in found:
        logger.info(
            "the tokenizer's end-of-sequence token %s (%d) ends samples, too; the model's configs name %s",
            getattr(tokenizer, "eos_token", ""), own, sorted(found) or "none",
        )  # fmt: skip
        found |= {own}
    inside = frozenset(token for token in found if 0 <= token < vocab_size)
    if outside := sorted(found - inside):
        logger.warning(
            "the end-of-sequence ids %s are ignored: the model's vocabulary has the ids 0 to %d",
            outside,
            vocab_size - 1,
        )
    return inside


def media_token_ids(config: PretrainedConfig) -> frozenset[int]:
    """Return the ids that stand for images, videos or sound in the prompts of a multimodal model. config: the config of
    the checkpoint. The config of a model can be a text config alone, which lacks these ids."""
    if getattr(config, "text_config", None) is None:
        return frozenset()
    values = [value for name, value in vars(config).items() if _MEDIA.search(name)]
    ids = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
    return frozenset(one for one in ids if isinstance(one, int))


def banned_ids(
    tokenizer: PreTrainedTokenizerBase | None, media_ids: frozenset[int], eos_ids: frozenset[int], vocab_size: int
) -> tuple[tuple[int, int], ...]:
    """Return ranges [begin, end) of the ids that are never drawn: ids that the tokenizer lacks, and ids in place of
    images or sound. No prompt can contain the latter, and some models (Gemma 4) do not compute them as text."""
    missing = {*ids_without_token(tokenizer, vocab_size)} - eos_ids
    media = {token for token in media_ids if 0 <= token < vocab_size} - eos_ids - missing
    if missing:
        logger.info("%d ids of the model's vocabulary are not in the tokenizer and are never drawn", len(missing))
    if media:
        logger.info("ids in place of images or sound are never drawn: %s", ", ".join(map(str, sorted(media))))
    return ranges_of(sorted(missing | media))


def ranges_of(token_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return ranges [begin, end) that hold these ids and no others. The ids are in order."""
    if not token_ids:
        return ()
    ids = np.array(token_ids)
    breaks = np.flatnonzero(np.diff(ids) != 1)
    begins, ends = ids[[0, *(breaks + 1)]], ids[[*breaks, -1]] + 1
    return tuple(zip(begins.tolist(), ends.tolist(), strict=True))


def ids_without_token(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """Return the ids of a model's vocabulary that its tokenizer does not have, as in a padded vocabulary. The list is
    empty if the tokenizer does not list its tokens."""
    if tokenizer is None:
        return []
    try:
        known, size = set(tokenizer.get_vocab().values()), len(tokenizer)
    except NotImplementedError:
        return []
    if len(known) < size:  # the list is incomplete, as mistral-common's for parts of characters
        return list(range(size, vocab_size))
    return [token for token in range(vocab_size) if token not in known]
