"""Names of the parts of a layer in the decoders of Transformers.

They determine which tensors are adjacent in a slot (`layout.py`), which layers take adapters, and which run fused.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Projections:
    """Linear layers of attention or of a gated MLP: several that read the same input, and the output layer."""

    parts: tuple[str, ...]
    """Queries, keys and values; or gate and up. They run as one product."""
    whole: str
    """Name of the layer in models that store the parts as one."""
    out: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.parts, self.whole, self.out)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of the norms of a layer; None: the layer has no such norm. A layer matches if it has the last norm."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None

    @property
    def last(self) -> str | None:
        return self.after_mlp or self.before_mlp


ATTENTION = (
    Projections(("q_proj", "k_proj", "v_proj"), whole="qkv_proj", out="o_proj"),
    Projections(("q_proj", "k_proj", "v_proj"), whole="qkv_proj", out="dense"),  # Phi
)
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
"""Linear layers of a Gated DeltaNet that read the same input (Qwen 3.5). They run as one product."""
MLP = (Projections(("gate_proj", "up_proj"), whole="gate_up_proj", out="down_proj"),)

LAYER_NORMS = (
    LayerNorms(  # Gemma; OLMo 2 without those before
        before_attention="input_layernorm",
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    LayerNorms(  # GLM 4
        before_attention="input_layernorm",
        after_attention="post_self_attn_layernorm",
        before_mlp="post_attention_layernorm",
        after_mlp="post_mlp_layernorm",
    ),
    LayerNorms(  # Bamba
        before_attention="input_layernorm",
        after_attention=None,
        before_mlp="pre_ff_layernorm",
        after_mlp=None,
    ),
    LayerNorms(  # Llama, Qwen, Mistral, Phi-3; Cohere and Phi without the second
        before_attention="input_layernorm",
        after_attention=None,
        before_mlp="post_attention_layernorm",
        after_mlp=None,
    ),
)
"""The first match applies, otherwise the last entry."""
LAST_NORMS = ("norm", "final_layernorm")
"""Names of the norm before the head."""
MLPS = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp")
"""Names of a layer's MLPs. The outputs of several are added."""
