"""The next version of the weights in the form in which one of vLLM's workers computes with them.

vLLM fuses projections, keeps the part of them that belongs to its rank, and on a CPU packs the weights of its products.
Its own loaders define the place of each part of each tensor: the copies that they make out of a slot are recorded once,
and repeated for every version. Their targets are shadows next to the weights in use, and replace those weights between
two steps.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from inflight_kernels import copy_all
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from inflight.integrations.vllm_backend.converted import ConvertedLayer, Unmappable

_PROBE_ROWS = (1, 4, 16)
"""Numbers of rows in tests. oneDNN uses different kernels for few rows and for many."""
_ROUNDING = 0.02
"""Largest relative difference that passes between a parameter and the same one made from parts with fewer bits."""


LoaderCall = partial[Any]
"""A call of a loader without its target, the first argument."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of every slot, by bytes."""

    begin: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, slot: torch.Tensor) -> "Part":
        """Return the place of a tensor in its slot. Raises Unmappable if it is not part of the slot."""
        begin = int(tensor.storage_offset()) * tensor.itemsize - int(slot.storage_offset())
        elements = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        nbytes = elements * tensor.itemsize
        home = slot.untyped_storage().data_ptr()
        if tensor.untyped_storage().data_ptr() != home or begin < 0 or begin + nbytes > slot.numel():
            raise Unmappable("vLLM computes it from published tensors while it loads them")
        return cls(begin, nbytes, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        part = slot[self.begin : self.begin + self.nbytes].view(self.dtype)
        return part.as_strided(self.size, self.stride, part.storage_offset())


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy from a part of a slot to a part of a parameter."""

    source: Part
    target_size: tuple[int, ...]
    target_stride: tuple[int, ...]
    target_begin: int

    def target(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.as_strided(self.target_size, self.target_stride, self.target_begin)


@dataclass(slots=True, eq=False)
class _Product:
    """A layer's weight as oneDNN has packed it (vLLM on a CPU). The layer reads the address of the packed weight from a
    tensor whenever it runs, compiled or not. vLLM's handler frees the memory when the last reference to the handler
    ends."""

    live: Any
    next: Any = None
    """The handler of the next packed weight, then of the previous one."""

    def commit(self) -> None:
        live, after = self.live.handler_tensor, self.next.handler_tensor
        before = int(live)
        live.copy_(after)
        after.fill_(before)


@dataclass(slots=True, eq=False)
class Parameter:
    """One parameter of vLLM: its current and its next value."""

    name: str
    live: torch.Tensor | None
    """The tensor that vLLM computes with; None if it computes only with packed products of it."""
    next: torch.Tensor
    copies: list[Copy]
    computed: list["Computed"] = field(default_factory=list)
    """Used in place of `copies`."""
    products: list[_Product] = field(default_factory=list)
    in_place: bool = False
    """Another tensor of the model refers to the memory of `live`."""

    @property
    def sources(self) -> list[Part]:
        """The parts of a slot from which the parameter is made."""
        return [copy.source for copy in self.copies] + [part for one in self.computed for part in one.parts.values()]

    def agree(self, live: torch.Tensor, after: torch.Tensor) -> bool:
        """Return True if a value of the live parameter equals that of the next one, apart from the rounding of parts
        with fewer bits."""
        narrow = bool(self.sources) and all(part.dtype.itemsize < self.next.itemsize for part in self.sources)
        return torch.equal(live, after) or (narrow and torch.allclose(live, after, rtol=_ROUNDING, atol=_ROUNDING))


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A call of a loader of vLLM that computes a parameter from parts of a slot, such as −exp(A_log) from A_log."""

    call: LoaderCall
    made_for: torch.Tensor
    """The parameter as the loader takes it."""
    parts: dict[str, Part]
    """The arguments of the call that are parts of a slot."""

    @classmethod
    def of(cls, call: LoaderCall, made_for: torch.Tensor, slot: torch.Tensor) -> "Computed":
        """Make a record of a call. Raises Unmappable if an argument is a tensor that is not part of the slot."""
        tensors = {name: value for name, value in call.keywords.items() if isinstance(value, torch.Tensor)}
        return cls(call, made_for, {name: Part.of(tensor, slot) for name, tensor in tensors.items()})

    def make(self, target: torch.Tensor, slot: torch.Tensor) -> None:
        self.made_for.data = target
        self.call(self.made_for, **{name: part.view(slot) for name, part in self.parts.items()})


@dataclass(slots=True, eq=False)
class Conversion:
    """A layer that vLLM converts after loading, and its loaded parameters."""

    layer: ConvertedLayer
    loaded: dict[str, Parameter]
    """By name in the layer. Layers of the same form use the same memory, one after another."""

    def prepare(self, slot: torch.Tensor) -> None:
        """Make the next tensors of the layer from the contents of a slot. Raises Unmappable."""
        for parameter in self.loaded.values():
            if not parameter.computed:  # The previous conversion, or padding, can have left other values.
                parameter.next.zero_()
        _fill(list(self.loaded.values()), slot)
        loaded = {name: parameter.next for name, parameter in self.loaded.items()}
        with next(iter(loaded.values())).device:
            self.layer.convert(loaded)


def _fill(parameters: Sequence[Parameter], slot: torch.Tensor) -> None:
    """Make the next values of parameters, by copies and by calls of loaders, from the contents of a slot."""
    copies = [(copy, parameter.next) for parameter in parameters for copy in parameter.copies]
    copy_all([copy.target(target) for copy, target in copies], [copy.source.view(slot) for copy, _ in copies])
    with torch.no_grad():
        for parameter in parameters:
            for computed in parameter.computed:
                computed.make(parameter.next, slot)


class Shadow:
    """Next parameters of one worker, separate from its current parameters. `prepare` can run in any thread."""

    def __init__(
        self, slots: Sequence[torch.Tensor], parameters: list[Parameter], converted: Sequence[Conversion] = ()
    ):
        """slots: u8[n] each. The constructor must run in the thread that computes."""
        self._slots, self._parameters, self._converted = slots, parameters, converted
        loaded = parameters or [parameter for one in converted for parameter in one.loaded.values()]
        self._on_gpu = any(parameter.next.is_cuda for parameter in loaded)
        self._num_threads = torch.get_num_threads()
        self._committed: Any = None
        """The last commit on a GPU."""

    def reads(self) -> list[tuple[int, int]]:
        """Return the byte ranges of a slot that are read."""
        parameters = [*self._parameters, *(p for one in self._converted for p in one.loaded.values())]
        return [(part.begin, part.begin + part.nbytes) for p in parameters for part in p.sources]

    def prepare(self, slot: int) -> None:
        """Convert the version of a slot to the form in which vLLM computes with it."""
        # Set the number of threads of this thread: with another number, oneDNN could pack weights in another form than
        # it computes with. vLLM has replaced torch.set_num_threads by a function that does nothing.
        torch._C.set_num_threads(self._num_threads)
        for parameter in self._parameters:
            for product in parameter.products:
                product.next = None  # two packed forms of each weight are enough
        if self._committed is not None:
            torch.cuda.current_stream().wait_event(self._committed)  # The commit reads the memory that is written here.
        _fill([parameter for parameter in self._parameters if parameter.live is not None], self._slots[slot])
        for parameter in self._parameters:
            if parameter.live is None:
                _fill([parameter], self._slots[slot])
            for product in parameter.products:
                product.next = _pack(parameter.next)
        for one in self._converted:
            one.prepare(self._slots[slot])

    def commit(self) -> None:
        """Replace the weights that vLLM computes with by the prepared ones. On a GPU the copies are queued on the
        current stream of the thread that computes."""
        in_place = [
            (parameter.live, parameter.next)
            for parameter in self._parameters
            # The graphs of a GPU contain its address, too.
            if parameter.live is not None and (parameter.live.is_cuda or parameter.in_place)
        ]
        copy_all([live for live, _ in in_place], [prepared for _, prepared in in_place])
        for one in self._converted:
            one.layer.commit()
        if self._on_gpu:
            self._committed = torch.cuda.current_stream().record_event()
        for parameter in self._parameters:
            live = parameter.live
            if live is not None and not (live.is_cuda or parameter.in_place):
                live.data, parameter.next = parameter.next, live.data
            for product in parameter.products:
                product.commit()


class WeightShadow(Shadow):
    """Shadow of the next weights."""

    def __init__(self, model: nn.Module, slots: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]):
        """slots: u8[n] each; the first holds the current weights of the model. tensors: views of the first slot by
        their names in checkpoints. Raises Unmappable."""
        super().__init__(slots, *_map(model, slots[0], tensors))
        self._check()
        self.commit()  # The first version then equals the contents of its slot, after rounding.

    @torch.no_grad()
    def _check(self) -> None:
        """Compare the result of preparing the first slot, in another thread as later, with the weights of the model."""
        from vllm import _custom_ops as ops  # pyright: ignore[reportMissingImports]

        with ThreadPoolExecutor(1) as thread:
            thread.submit(self.prepare, 0).result()
        for parameter in self._parameters:
            if parameter.live is not None and not parameter.agree(parameter.live, parameter.next):
                raise Unmappable(f"{parameter.name} is not what was loaded")
            for product, rows in itertools.product(parameter.products, _PROBE_ROWS):
                probe = torch.randn(rows, product.live.k).to(parameter.next.dtype)
                outputs = (ops.onednn_mm(packed, probe, None) for packed in (product.live, product.next))
                if not parameter.agree(*outputs):
                    raise Unmappable(f"the packed form of {parameter.name} is not what was loaded")
        for one in self._converted:
            if not one.layer.is_loaded():
                raise Unmappable(f"{one.layer.name}: a second conversion gives other values")


def _map(
    model: nn.Module, slot: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> tuple[list[Parameter], list[Conversion]]:
    """Return vLLM's parameters that are made by its loaders alone, and the layers that it converts afterwards. slot:
    u8[n], the weights that vLLM has loaded."""
    referred, device = _referred(model), next(model.parameters()).device
    scratch: dict[torch.dtype, torch.Tensor] = {}
    parameters: dict[nn.Module, dict[str, Parameter]] = {}
    converted: set[nn.Module] = set()
    memory: dict[tuple[Any, ...], torch.Tensor] = {}
    traces = _trace(model, tensors)
    for traced in traces:
        parameter, live, product = _loaded(traced, slot, device), traced.live, _packed_product(traced.layer)
        parameters.setdefault(traced.layer, {})[traced.name] = parameter
        copied = sum(torch.Size(copy.target_size).numel() for copy in parameter.copies)
        if live is not None and live.shape == traced.meta.shape and live.dtype == traced.meta.dtype:
            parameter.live, parameter.in_place = live, live.untyped_storage().data_ptr() in referred
            parameter.next.copy_(live)  # padding keeps its values
            _fill([parameter], slot)
            if not parameter.agree(live, parameter.next):
                converted.add(traced.layer)
        elif product is not None and live is not None and not live.numel() and copied == traced.meta.numel():
            held = scratch.get(traced.meta.dtype)
            if held is None or held.numel() < traced.meta.numel():
                scratch[traced.meta.dtype] = parameter.next.new_empty(traced.meta.numel())
            parameter.products.append(_Product(product))
        else:
            converted.add(traced.layer)
        if traced.layer in converted:
            # Their memory is needed only while a layer is converted.
            key = _place_of(traced.name, traced.meta)
            parameter.live, parameter.next = None, memory.setdefault(key, parameter.next)
    for layer in model.modules():
        if getattr(layer, "kv_b_proj", None) in converted:
            raise Unmappable(f"{type(layer).__name__}: vLLM computes other weights from the converted kv_b_proj")
    conversions = [
        _conversion(one, parameters[one.layer], memory, referred)
        for one in traces
        if one.layer in converted and one.name == next(iter(parameters[one.layer]))
    ]
    plain = [parameter for layer, its in parameters.items() if layer not in converted for parameter in its.values()]
    for layer in model.modules():
        # MambaMixer2 computes with a view of the convolution's weights that it made before vLLM packed them.
        view, convolution = layer._buffers.get("conv_weights"), layer._modules.get("conv1d")
        if view is not None and convolution in converted:
            packed = parameters[convolution]["weight"]
            if not packed.copies:
                raise Unmappable(f"{packed.name}: vLLM computes a convolution that it also has a view of")
            plain.append(Parameter(f"the view of {packed.name}", view, view.clone(), packed.copies, in_place=True))
    by_live = {id(parameter.live): parameter for parameter in plain if parameter.live is not None}
    for parameter in plain:
        if parameter.live is None:  # all packed parameters alternately use one piece of memory
            shape = parameter.next.shape
            parameter.next = scratch[parameter.next.dtype][: shape.numel()].view(shape)
    for layer in model.modules():
        weight, product = layer._parameters.get("weight"), _packed_product(layer)
        if weight is not None and id(weight) in by_live and product is not None:
            by_live[id(weight)].products.append(_Product(product))
    return plain, conversions


def _loaded(traced: "_Traced", slot: torch.Tensor, device: torch.device) -> Parameter:
    """Return a parameter as vLLM's loaders make it on a device. Raises Unmappable."""
    from vllm.model_executor.model_loader.reload.meta import (  # pyright: ignore[reportMissingImports]
        materialize_meta_tensor,
    )

    with device:
        made_for = materialize_meta_tensor(traced.meta)
    copies, computed = [], []
    try:
        copies = [copy for call in traced.calls for copy in _noted(call, made_for, slot)]
    except Unmappable:
        try:
            computed = [Computed.of(call, made_for, slot) for call in traced.calls]
        except Unmappable as error:
            raise Unmappable(f"{traced.label}: {error}") from error
    return Parameter(traced.label, None, made_for.data, copies, computed)


def _conversion(
    traced: "_Traced",
    loaded: dict[str, Parameter],
    memory: dict[tuple[Any, ...], torch.Tensor],
    referred: Set[int],
) -> Conversion:
    """Return the conversion of a layer. loaded: its parameters that have loaders; memory: of the loaded parameters of
    all such layers. Raises Unmappable."""
    from vllm.model_executor.layers.linear import LinearBase  # pyright: ignore[reportMissingImports]

    layer = traced.layer
    device = next(iter(loaded.values())).next.device
    for name, meta in traced.restored.items():
        if name not in loaded and not meta.is_meta:
            continue  # vLLM does not convert it.
        key = _place_of(name, meta)
        if key not in memory:
            memory[key] = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
        parameter = loaded.setdefault(name, Parameter(name, None, memory[key], []))
        parameter.live, parameter.next = None, memory[key]
    held = [tensor for tensor in layer._parameters.values() if tensor is not None]
    shared = any(tensor.untyped_storage().data_ptr() in referred for tensor in held)
    in_place = shared or not isinstance(layer, LinearBase)
    converted = ConvertedLayer(traced.layer_label, layer, traced.restored, in_place=in_place)
    return Conversion(converted, loaded)


def _place_of(name: str, meta: torch.Tensor) -> tuple[Any, ...]:
    """Parameters with equal places use the same memory, one after another."""
    return name, meta.shape, meta.stride(), meta.dtype


def _referred(model: nn.Module) -> set[int]:
    """Return addresses of memory that several tensors of the model refer to, or that others than parameters refer to:
    MambaMixer2.conv_weights and MLAAttention.W_UV are views of parameters."""
    parameters: dict[int, set[int]] = {}
    others: set[int] = set()
    for layer in model.modules():
        for value in (*layer._parameters.values(), *layer._buffers.values(), *vars(layer).values()):
            if isinstance(value, nn.Parameter):
                parameters.setdefault(value.untyped_storage().data_ptr(), set()).add(id(value))
            elif isinstance(value, torch.Tensor):
                others.add(value.untyped_storage().data_ptr())
    return (others | {address for address, its in parameters.items() if len(its) > 1}) - {0}


@dataclass(frozen=True, slots=True, eq=False)
class _Traced:
    """A parameter of vLLM, and the calls of its loader."""

    layer_label: str
    name: str
    layer: nn.Module
    meta: torch.Tensor
    """The parameter as it is before vLLM processes it, without values."""
    live: torch.Tensor | None
    """The current parameter."""
    restored: dict[str, torch.Tensor]
    """All parameters of the layer as `meta`, by name."""
    loader: Callable[..., Any]
    calls: list[LoaderCall] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.layer_label}.{self.name}"

    def note(self, *args: Any, **kwargs: Any) -> bool:
        """Record a call of the loader instead of loading."""
        arguments = inspect.signature(self.loader).bind(*args, **kwargs).arguments
        del arguments[next(iter(arguments))]
        self.calls.append(partial(self.loader, **arguments))
        return True  # the loaders of experts return True for an expert of this rank


def _trace(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[_Traced]:
    """Record vLLM's loading of these tensors without loading anything. Return the parameters that it would load."""
    from vllm.model_executor.model_loader.reload.layerwise import (  # pyright: ignore[reportMissingImports]
        _get_original_loader,
        _place_kernel_tensors,
        get_layerwise_info,
        initialize_layerwise_reload,
    )
    from vllm.model_executor.model_loader.reload.utils import get_layer_tensors  # pyright: ignore[reportMissingImports]

    traced: list[_Traced] = []
    original: dict[int, tuple[Any, Any]] = {}
    initialize_layerwise_reload(model)
    try:
        for layer_name, layer in model.named_modules():
            kernel = get_layerwise_info(layer).kernel_tensors
            parameters: dict[str, Any] = get_layer_tensors(layer)
            for name, tensor in parameters.items():
                if id(tensor) in original:  # the router's bias is also a parameter of the experts
                    continue
                loader = _get_original_loader(tensor)
                original[id(tensor)] = tensor, loader
                live = None if kernel is None else kernel[0].get(name, kernel[1].get(name))
                label = f"{layer_name} ({type(layer).__name__})"
                one = _Traced(label, name, layer, tensor, live, parameters, loader)
                tensor.weight_loader = one.note
                traced.append(one)
        load: Any = model.load_weights
        load(iter(tensors.items()))
    finally:
        for tensor, loader in original.values():
            tensor.weight_loader = loader
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                _place_kernel_tensors(layer, info)
            info.reset()
    return [one for one in traced if one.calls]


class NoteCopies(TorchDispatchMode):
    """Records copies. It executes them only with `make`."""

    def __init__(self, *, make: bool = False) -> None:
        super().__init__()
        self._make = make
        self.made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.made.append((args[0], args[1]))
            if not self._make:
                return args[0]
        return func(*args, **(kwargs or {}))


def copy_of(target: torch.Tensor, source: torch.Tensor, slot: torch.Tensor) -> Copy:
    """Return a recorded copy. Raises Unmappable if its source is not part of the slot."""
    part = Part.of(source if source.shape == target.shape else source.expand(target.shape), slot)
    return Copy(part, tuple(target.shape), target.stride(), int(target.storage_offset()))


def _noted(load: LoaderCall, parameter: torch.Tensor, slot: torch.Tensor) -> list[Copy]:
    """Return the copies that a loader makes to a parameter. Raises Unmappable if a source is not in the slot."""
    with NoteCopies() as noted, torch.no_grad():
        load(parameter)
    if any(t.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr() for t, _ in noted.made):
        raise Unmappable(f"{type(parameter).__name__} is filled by way of something else")
    return [copy_of(target, source, slot) for target, source in noted.made]


def _packed_product(layer: nn.Module) -> Any:
    """Return vLLM's handler of a weight that oneDNN has packed, or None."""
    linear = getattr(layer, "cpu_linear", None)
    closure = getattr(linear, "__closure__", None) or ()
    held = [cell.cell_contents for cell in closure]
    return next((part for part in held if hasattr(part, "handler_tensor")), None)


def _pack(weight: torch.Tensor) -> Any:
    """Pack a weight [N, K] for products with it. Return vLLM's handler."""
    from vllm import _custom_ops as ops  # pyright: ignore[reportMissingImports]

    return ops.create_onednn_mm(weight.t(), 32)
