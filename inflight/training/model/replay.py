"""Replays the experts that the engine recorded, so that the trainer computes each token with the experts that drew it.

Only the selection is replayed: the gate weights are computed from the current logits at the recorded experts, by the
router's own formula, so that the router gets its gradient. Source: R3, arXiv 2510.11370.

The router runs unchanged, except that its selecting call of torch.topk returns the recorded experts. T tokens, L layers
with a router, E experts, k of them per token.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from inflight.core.errors import RoutedExpertsError
from inflight.core.rollout import Rollout

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_router_classes")
_TOP_K = ("top_k", "num_experts_per_tok", "top_k_experts")
_in_backward: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()
"""Ends the replay of a backward pass in progress, by the first router of the model."""
_PEFT_COPY = re.compile(r"\.(original_module|modules_to_save\.[^.]+)$")


@contextmanager
def replay_routed_experts(model: nn.Module, routed_experts: torch.Tensor) -> Iterator[None]:
    """Make every router of `model` take the recorded experts within the context instead of its top k.

    routed_experts: i16, i32 or i64 [T, layers, k], for the T tokens in the order of the model's flattened input; for a
    row of −1, the router of that layer selects. Each pass through the model within the context replays all of it.

    A backward pass through the model's outputs replays, too, because activation checkpointing runs routers again there.
    Of nested contexts the innermost has effect. Under torch.compile the routers run uncompiled.

    Raises RoutedExpertsError if the model has no routers or the routed experts are not of this model; in the pass, if
    the number of tokens differs or a router selects in another way than by torch.topk; at the end, if no router ran.
    """
    layers = _routers(model)
    replay = _Replay(list(layers.values()), routed_experts)
    _end_backward(replay.first)  # It has failed if it has not ended.
    watch = cast(Callable[..., None], torch.compiler.disable(replay.watch))
    with ExitStack() as stack:
        stack.callback(replay.install())
        above = next(iter(layers)).split(".")[:-1]  # The modules that contain the first router see each backward pass.
        for depth in range(len(above) + 1):
            module = model.get_submodule(".".join(above[:depth]))
            stack.callback(module.register_forward_hook(watch).remove)
        yield
    if not replay.has_run:
        raise RoutedExpertsError(
            "no router ran while routed experts were replayed: run the forward pass of this model within the context"
        )


def end_failed_backward(model: nn.Module) -> None:
    """Restore the routers of a model whose last backward pass raised an error before its end."""
    if _in_backward:
        for router in [module for module in model.modules() if module in _in_backward]:
            _end_backward(router)


def _end_backward(first_router: nn.Module) -> None:
    if (restore := _in_backward.pop(first_router, None)) is not None:
        restore()


class _Replay:
    """The recorded experts, and the routers of each layer that take them."""

    def __init__(self, layers: Sequence[Sequence[nn.Module]], routed_experts: torch.Tensor):
        routers = [copies[0] for copies in layers]
        parameter = next(routers[0].parameters(), None)
        if parameter is not None and not parameter.is_meta:
            routed_experts = routed_experts.to(parameter.device)
        _check(routers, routed_experts)
        self._layers, self._experts = layers, routed_experts
        self._num_experts = [_sizes(router, _NUM_EXPERTS) for router in routers]
        self._replayed_TL = routed_experts[..., 0] >= 0
        self.first = routers[0]
        self.has_run = False
        self._is_installed = False

    def install(self) -> Callable[[], None]:
        """Make all routers replay. Returns a function that restores them."""
        restores = [_patch(router, self, layer) for layer, copies in enumerate(self._layers) for router in copies]
        self._is_installed = True

        def restore() -> None:
            self._is_installed = False
            for restore_router in restores:
                restore_router()

        return restore

    def run(self, router: nn.Module, bare: Callable[..., Any], layer: int, args: tuple, kwargs: dict) -> Any:
        """Return the output of `bare`, the router's own forward, with the recorded experts."""
        with _Selection(self._experts[:, layer], self._replayed_TL[:, layer], self._num_experts[layer]) as selection:
            output = bare(*args, **kwargs)
        if not selection.has_selected:
            sizes = " or ".join(map(str, sorted(set(self._num_experts[layer]))))
            calls = f" (it takes {', '.join(selection.calls)})" if selection.calls else ""
            raise RoutedExpertsError(
                f"{type(router).__name__} does not select {self._experts.shape[-1]} of {sizes} experts by torch.topk"
                f"{calls}; its routed experts cannot be replayed"
            )
        self.has_run = True
        return output

    def watch(self, module: nn.Module, _: object, output: object) -> None:
        """Replay in the backward pass through a module's output, if this replay is the innermost."""
        if getattr(self.first.forward, "_replay", None) is self:
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        if not self._is_installed:
            _end_backward(self.first)  # Of another pass through the model, whose part of this backward pass is done.
            _in_backward[self.first] = self.install()
            torch.autograd.Variable._execution_engine.queue_callback(partial(_end_backward, self.first))


class _Selection(TorchFunctionMode):
    """Returns the recorded experts from a router's selecting call of topk, for the tokens to replay."""

    def __init__(self, recorded_Tk: torch.Tensor, replayed_T: torch.Tensor, num_experts: Sequence[int]):
        self._recorded_Tk, self._replayed_T, self._num_experts = recorded_Tk, replayed_T, num_experts
        self._unmasked: tuple[torch.Tensor, torch.Tensor] | None = None
        self.calls: list[str] = []
        self.has_selected = False

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.topk, torch.Tensor.topk):
            return self._select(result, *args, **kwargs)
        if func in (torch.masked_fill, torch.Tensor.masked_fill) and args:
            self._unmasked = (result, args[0])
        return result

    def _select(self, own: Any, input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True):
        """Return the result of a call of topk, whose original result is `own`: the last such call of the router
        selects."""
        width, is_last_dim = input.shape[dim], dim % input.ndim == input.ndim - 1
        self.calls.append(f"{k} of {width}")
        if width not in self._num_experts or k != self._recorded_Tk.shape[-1] or not is_last_dim:
            return own  # This call chooses groups of experts.
        num_tokens = input.numel() // width
        if num_tokens != len(self._recorded_Tk):
            raise RoutedExpertsError(
                f"the model was given {num_tokens} tokens, the routed experts are of {len(self._recorded_Tk)}; "
                "they need one row per token of the flattened input (−1 for padding)"
            )
        recorded = self._recorded_Tk.to(input.device, torch.int64).reshape(own.indices.shape)
        replayed = self._replayed_T.to(input.device).reshape(*own.indices.shape[:-1], 1)
        self.has_selected = True
        # Use its unmasked score: a recorded expert can be outside of the groups that the router would choose now.
        scores = self._unmasked[1] if self._unmasked is not None and self._unmasked[0] is input else input
        values = torch.where(replayed, scores.gather(-1, recorded.clamp(min=0)), own.values)
        return torch.return_types.topk((values, torch.where(replayed, recorded, own.indices)))


def _patch(router: nn.Module, replay: _Replay, layer: int) -> Callable[[], None]:
    """Make a router replay. Returns a function that restores the router."""
    before = vars(router).get("forward")
    # This is the router's own forward even if an outer replay has replaced it.
    bare = getattr(router.forward, "_bare", router.forward)

    @torch.compiler.disable  # torch.compile would trace the selection with the replay applied to itself.
    def forward(*args: Any, **kwargs: Any) -> Any:
        return replay.run(router, bare, layer, args, kwargs)

    vars(forward).update(_bare=bare, _replay=replay)
    router.forward = forward
    return partial(delattr, router, "forward") if before is None else partial(setattr, router, "forward", before)


def _routers(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the routers of each layer, in module order, as the engine's RoutedExpertsRecorder finds them. PEFT's
    copies of one router are treated as one."""
    layers: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Router"):
            layers.setdefault(_PEFT_COPY.sub("", name), []).append(module)
    if not layers:
        raise RoutedExpertsError(f"{type(model).__name__} has no routers that could replay routed experts")
    return layers


def _sizes(router: nn.Module, names: Sequence[str]) -> list[int]:
    """Return the integers that a router, or otherwise its config, holds under these names."""
    for holder in (router, getattr(router, "config", None)):
        found = [value for name in names if isinstance(value := getattr(holder, name, None), int)]
        if found:
            return found
    return []


def _check(routers: Sequence[nn.Module], experts: torch.Tensor) -> None:
    if experts.dtype not in (torch.int16, torch.int32, torch.int64) or experts.ndim != 3:
        raise RoutedExpertsError(
            f"the routed experts are {experts.dtype}{list(experts.shape)}, expected int16 or int32 [tokens, layers, k]"
        )
    num_layers, k = experts.shape[1:]
    if num_layers != len(routers):
        raise RoutedExpertsError(f"the routed experts are of {num_layers} layers, the model has {len(routers)} routers")
    largest_L = experts.amax((0, 2)).tolist() if len(experts) else [-1] * num_layers
    for layer, (router, largest) in enumerate(zip(routers, largest_L, strict=True)):
        name = f"router {layer} ({type(router).__name__})"
        sizes, top_k = _sizes(router, _NUM_EXPERTS), _sizes(router, _TOP_K)
        if not sizes:
            raise RoutedExpertsError(f"{name} does not say how many experts it has, so that none can be replayed")
        if top_k and k not in top_k:
            raise RoutedExpertsError(f"there are {k} routed experts per token, {name} takes {top_k[0]}")
        if largest >= max(sizes):
            raise RoutedExpertsError(f"the routed experts name expert {largest}, {name} has {max(sizes)}")
    columns = [experts[..., choice].contiguous() for choice in range(k)]
    twice = torch.zeros(experts.shape[:-1], dtype=torch.bool, device=experts.device)
    partly = torch.zeros_like(twice)
    none_TL = columns[0] == -1
    for choice, column in enumerate(columns):
        partly |= ((column == -1) != none_TL) | (column < -1)
        for other in columns[:choice]:
            twice |= column == other
    for wrong, what in ((partly, "is neither experts nor all −1"), (twice & ~none_TL, "names an expert twice")):
        if wrong.any():
            token, layer = wrong.nonzero()[0].tolist()
            raise RoutedExpertsError(
                f"the row of token {token} in layer {layer} {what}: {experts[token, layer].tolist()}"
            )


def routed_experts_column(rollouts: Sequence[Rollout]) -> torch.Tensor | None:
    """Return the routed experts i16[sum(P + T), layers, k] of concatenated rollouts (prompt, then drawn tokens).

    The last token of each rollout, which was never fed, and rollouts without routed experts have −1. None if no rollout
    has them; ValueError if their numbers of layers or of experts differ, or they do not fit their rollout's length.
    """
    recorded = [rollout.routed_experts for rollout in rollouts if rollout.routed_experts is not None]
    if not recorded:
        return None
    shapes = {experts.shape[1:] for experts in recorded}
    if len(shapes) != 1:
        raise ValueError(f"rollouts of different models: (layers, experts per token) are {sorted(shapes)}")
    lengths = [len(rollout.prompt_token_ids) + len(rollout.token_ids) for rollout in rollouts]
    column = np.full((sum(lengths), *shapes.pop()), -1, np.int16)
    start = 0
    for rollout, length in zip(rollouts, lengths, strict=True):
        if rollout.routed_experts is not None:
            if len(rollout.routed_experts) != length - 1:
                raise ValueError(
                    f"rollout {rollout.request_id} has {length} tokens and routed experts of "
                    f"{len(rollout.routed_experts)}, expected {length - 1}"
                )
            column[start : start + length - 1] = rollout.routed_experts
        start += length
    return torch.from_numpy(column)
