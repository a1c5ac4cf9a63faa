"""Built-in model shapes: architecture of Qwen 3 or 3.5, random weights from a seed, byte-level tokenizer."""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = True
    """Input and output embeddings are one tensor."""
    hybrid: bool = False
    """Three of four layers are Gated DeltaNet, as in Qwen 3.5."""


SHAPES = {
    "tiny": Shape(128, 2, 384, 4, 2, 64, 512),
    "small": Shape(512, 8, 1536, 8, 4, 64, 8192),
    "base": Shape(768, 12, 3072, 12, 4, 64, 8192),
    "qwen3-0.6b": Shape(1024, 28, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": Shape(2048, 28, 6144, 16, 8, 128, 151936),
    "qwen3-8b": Shape(4096, 36, 12288, 32, 8, 128, 151936, tied=False),
    "tiny-moe": Shape(128, 2, 384, 4, 2, 64, 512, experts=8, experts_per_token=2),
    "tiny-hybrid": Shape(128, 4, 384, 4, 2, 64, 512, hybrid=True),
    "small-hybrid": Shape(512, 8, 1536, 8, 4, 64, 8192, hybrid=True),
}

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
EOS_TOKEN_ID = 256
PAD_TOKEN_ID = 257


def shape_config(name: str) -> PretrainedConfig:
    """Return the Transformers config of a built-in shape."""
    shape = SHAPES[name]
    common: dict[str, Any] = dict(  # noqa: C408
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=40960,
        tie_word_embeddings=shape.tied,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
    )
    if shape.experts:
        return Qwen3MoeConfig(
            num_experts=shape.experts,
            num_experts_per_tok=shape.experts_per_token,
            moe_intermediate_size=shape.intermediate,
            norm_topk_prob=True,
            **common,
        )
    if shape.hybrid:
        return Qwen3_5TextConfig(
            intermediate_size=shape.intermediate,
            linear_num_key_heads=shape.kv_heads,
            linear_num_value_heads=shape.heads,
            linear_key_head_dim=shape.head_dim,
            linear_value_head_dim=shape.head_dim,
            **common,
        )
    return Qwen3Config(intermediate_size=shape.intermediate, **common)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose first 256 ids are the bytes of UTF-8, followed by end-of-text and padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {char: byte for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TOKEN, PAD_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN, clean_up_tokenization_spaces=False
    )
