"""Chat templates of TRL's wheel, and a byte tokenizer that has their special tokens."""

import importlib.util
import re
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from inflight.engine.model.shapes import byte_tokenizer

_SPECIAL = re.compile(
    r"<[|｜][^<>\s'+{}]+?>|<[^<>\s'+{}/]+?[|｜]>|</?(?:s|bos|eos|start_of_turn|end_of_turn|think|tool_call)>|"
    r"<end_of_utterance>|\[/?(?:INST|TOOL_CALLS|gMASK)\]"
)


def trl_templates() -> dict[str, str]:
    """Maps names to the templates of model makers, and to those that TRL has changed for training; none without TRL."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return {}
    folder = Path(found.origin).parent / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def byte_tokenizer_for(template: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes whose special tokens are the ones that the template writes, and a few others."""
    tokenizer = byte_tokenizer()
    names = {*_SPECIAL.findall(template or ""), "<|im_end|>", "<|endoftext|>", "<bos>", "</s>"}
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(name, special=True, normalized=False) for name in sorted(names)]}
    )
    tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = template
    return tokenizer
