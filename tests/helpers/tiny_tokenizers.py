"""Tokenizers of the kinds that models have, from a few sentences: byte-level BPE (Qwen), SentencePiece with byte
fallback (Llama 2, Mistral v1) and Tekken (Mistral, special tokens first). CHARACTER is several tokens of each."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The capital of France is Paris.",
    "The capital of Germany is Berlin, and Paris is in France.",
    "user: What time is it? assistant: Let me see.",
    '{"name": "add", "arguments": {"a": 1}} {"name": "now", "arguments": {}}',
    "Grüße aus Köln. is Paris is the capital",
]
CHARACTER = "🌶"
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
)
"""Special tokens of every tokenizer here."""


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE; special tokens follow the vocabulary."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(CORPUS, _trainer([], alphabet=pre_tokenizers.ByteLevel.alphabet()))
    backend.add_special_tokens(_special("<|im_start|>", "<|im_end|>", *MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def tekken_like() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose first ids are special tokens."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *MARKS]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(CORPUS, _trainer(special, alphabet=pre_tokenizers.ByteLevel.alphabet()))
    backend.post_processor = _begin_with_bos(backend)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """SentencePiece as Transformers converts it: a space before the first word. Decoding drops it."""
    special = ["<unk>", "<s>", "</s>", *MARKS]
    trained = Tokenizer(models.BPE())
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.normalizer = spaces
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(CORPUS, _trainer([]))
    words, merges = trained.get_vocab(), _merges(trained)
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(words, key=words.__getitem__)]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(_special(*special))
    backend.post_processor = _begin_with_bos(backend)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {make.__name__: make for make in (byte_level, tekken_like, sentencepiece_like)}


def _trainer(special: list[str], alphabet: list[str] | None = None) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=len(special) + 400,
        special_tokens=_special(*special),
        initial_alphabet=alphabet or [],
        show_progress=False,
    )


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def _special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def _begin_with_bos(backend: Tokenizer) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
