"""Names of the parts of a layer in the decoders of Transformers.

They determine which tensors are adjacent in a slot (`layout.py`), which layers take adapters, and which run fused.
"""

from collections.abc import Set
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
    """Names of the norms of a layer; None: the layer has no such norm. A layer matches if it has the last of these
    norms and no other norm."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None

    @property
    def names(self) -> tuple[str | None, ...]:
        return (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)

    def match(self, names: Set[str]) -> bool:
        return (self.after_mlp or self.before_mlp) in names and names <= set(self.names)


ATTENTION = (
    Projections(("q_proj", "k_proj", "v_proj"), whole="qkv_proj", out="o_proj"),
    Projections(("q_proj", "k_proj", "v_proj"), whole="qkv_proj", out="dense"),  # Phi
    Projections(("q_proj", "k_proj", "v_proj"), whole="qkv_proj", out="out_proj"),  # LFM 2
)
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
"""Linear layers of a Gated DeltaNet that read the same input (Qwen 3.5). They run as one product."""
MLP = (
    Projections(("gate_proj", "up_proj"), whole="gate_up_proj", out="down_proj"),
    Projections(("w1", "w3"), whole="w13", out="w2"),  # LFM 2
)
HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("q_norm", "q_norm"))
"""Names of the norms of queries and of keys; LFM 2's are the second pair. In the last one both share a norm."""

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
    LayerNorms(  # AFMoE
        before_attention="input_layernorm",
        after_attention="post_attention_layernorm",
        before_mlp="pre_mlp_layernorm",
        after_mlp="post_mlp_layernorm",
    ),
    LayerNorms(  # Bamba, Falcon-H1
        before_attention="input_layernorm",
        after_attention=None,
        before_mlp="pre_ff_layernorm",
        after_mlp=None,
    ),
    LayerNorms(  # LFM 2
        before_attention="operator_norm",
        after_attention=None,
        before_mlp="ffn_norm",
        after_mlp=None,
    ),
    LayerNorms(  # Apertus
        before_attention="attention_layernorm",
        after_attention=None,
        before_mlp="feedforward_layernorm",
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
LAST_NORMS = ("norm", "final_layernorm", "embedding_norm", "norm_f")
"""Names of the norm before the head."""
ROTATIONS = ("rotary_emb", "pos_emb")
"""Names of the module that makes the tables for the rotation of heads."""
MLPS = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp")
"""Names of a layer's MLPs. The outputs of several are added."""
