"""The names that known decoders of Transformers give the parts of a layer.

From these follow which tensors lie side by side in a slot (`layout.py`), what adapters are put on, and what runs fused.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Projections:
    """The products of attention, or of a gated MLP: several that read the same input, and one that gives the output."""

    parts: tuple[str, ...]
    """Queries, keys and values; or gate and up. They are computed as one product."""
    whole: str
    """The name of that product where a model holds it as one."""
    out: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.parts, self.whole, self.out)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The norms of a layer; None where it has none. A layer is of this kind if it has the last of them."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None

    @property
    def last(self) -> str | None:
        return self.after_mlp or self.before_mlp


ATTENTION = (Projections(("q_proj", "k_proj", "v_proj"), whole="qkv_proj", out="o_proj"),)
MLP = (Projections(("gate_proj", "up_proj"), whole="gate_up_proj", out="down_proj"),)

LAYER_NORMS = (
    LayerNorms(  # Gemma; OLMo 2 without those before
        before_attention="input_layernorm",
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    LayerNorms(  # Llama, Qwen, Mistral, Phi-3
        before_attention="input_layernorm",
        after_attention=None,
        before_mlp="post_attention_layernorm",
        after_mlp=None,
    ),
)
"""The first kind that applies is taken, else the last one."""
