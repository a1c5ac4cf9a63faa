"""An engine that says any text, with any tokenizer: its model is a GPT-2 whose head sees the position alone, so that a
text can hold a word twice."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

import inflight

_POSITIONS, _PEAK = 256, 100.0


class Speaker:
    """`say` publishes weights under which a prompt of some length has one answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, directory: Path):
        self.tokenizer, self.path = tokenizer, str(directory)
        vocabulary = -(-len(tokenizer) // 64) * 64
        self._end = int(tokenizer.eos_token_id)
        config = GPT2Config(
            n_embd=_POSITIONS, n_layer=1, n_head=4, n_inner=8, vocab_size=vocabulary, n_positions=_POSITIONS,
            bos_token_id=None, eos_token_id=self._end, tie_word_embeddings=False,
        )  # fmt: skip
        self._model = GPT2LMHeadModel(config).requires_grad_(False)
        for name, weight in self._model.named_parameters():
            if "ln" not in name:
                weight.zero_()
        self._model.transformer.wpe.weight.copy_(torch.eye(_POSITIONS))
        self._model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        self.engine = inflight.launch(self.path, device="cpu", threads=1, max_sequences=8)
        self._publisher = self.engine.publisher(self._model)

    def say(self, prompt: Sequence[int], text: str | Sequence[int]) -> list[int]:
        """Answer prompts of this length with a text, or with tokens. Returns the tokens."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else list(text)
        head = self._model.lm_head.weight.zero_()
        head[self._end] = _PEAK
        for position, token in enumerate(ids, len(prompt) - 1):
            head[self._end, position], head[token, position] = 0, _PEAK
        self.engine.wait_for_version(self._publisher.publish())
        return [*ids, self._end]

    def close(self) -> None:
        self._publisher.close()
        self.engine.close()
