"""A decoder of recurrent layers and attention, and the kind of its recurrent layers. Engines name it
"toy_recurrent:KIND"."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from inflight.engine.cache.kinds import ChunkStates, LayerKind, StateTensor

VOCABULARY = 199
_WIDTH = 3
"""Tokens that the convolution sees."""


class ToyConfig(LlamaConfig):
    model_type = "toy_recurrent"


class Recurrence(nn.Module):
    """h_t = a · h_{t−1} + W y_t in fp32, where y is a causal convolution of x. The output is U (h_t · silu(V x_t))."""

    def __init__(self, config: ToyConfig):
        super().__init__()
        size = config.hidden_size
        self.convolution = nn.Conv1d(size, size, _WIDTH, groups=size, bias=False)
        self.decay = nn.Parameter(torch.linspace(-1.0, 3.0, size))
        self.w, self.v, self.u = (nn.Linear(size, size, bias=False) for _ in range(3))

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        history = hidden_states.new_zeros(_WIDTH - 1, hidden_states.shape[-1])
        h_D = torch.zeros_like(self.decay, dtype=torch.float32)
        return torch.stack([self.advance(x_TD, history, h_D)[0] for x_TD in hidden_states]), None

    def advance(
        self, x_TD: torch.Tensor, history: torch.Tensor, h_D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output of T tokens of one sequence, and the state after them: the last columns, and h."""
        columns = torch.cat((history, x_TD))
        inputs = self.w(self.convolution(columns.T).T).float()
        decay, rows = self.decay.float().sigmoid(), []
        for row in inputs:
            h_D = decay * h_D + row
            rows.append(h_D)
        gated = torch.stack(rows).to(x_TD.dtype) * F.silu(self.v(x_TD))
        return self.u(gated), columns[len(x_TD) :], h_D


class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def __init__(self, config: ToyConfig):
        super().__init__(config)
        for layer, kind in zip(self.model.layers, config.layer_types, strict=True):
            if kind == "linear_attention":
                layer.self_attn = Recurrence(config)
        self.post_init()


def state_of(module: Recurrence) -> list[StateTensor]:
    size = len(module.decay)
    return [StateTensor((_WIDTH - 1, size), module.w.weight.dtype), StateTensor((size,), torch.float32)]


def run(module: Recurrence, states: ChunkStates, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
    histories, memories = states.tensors
    outputs = []
    for state, start, end in zip(states.index.tolist(), states.starts[:-1], states.starts[1:], strict=True):
        out, histories[state], memories[state] = module.advance(
            hidden_states[0, start:end], histories[state], memories[state]
        )
        outputs.append(out)
    return torch.cat(outputs)[None], None


KIND = LayerKind(
    layer_types=("linear_attention",),
    detect=lambda module: isinstance(module, Recurrence),
    tensors=state_of,
    forward=run,
)

AutoConfig.register("toy_recurrent", ToyConfig, exist_ok=True)
AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)


def make_toy(layer_types: tuple[str, ...], seed: int = 0) -> PreTrainedModel:
    """A random model of these layers."""
    torch.manual_seed(seed)
    config = ToyConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),  # pyright: ignore[reportCallIssue]
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=7,
        initializer_range=0.3,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
