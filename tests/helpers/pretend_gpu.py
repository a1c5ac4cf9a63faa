"""A GPU that is not there, for machines without one: tensors that say cuda:0 and compute on the CPU.

`install()` changes torch for the whole process, so that it belongs into a process of its own. From then on
- tensors of cuda:0 and of the CPU do not mix, but where CUDA lets them;
- a copy to the host that does not block holds garbage until the host has waited for its stream or a later event;
- a CUDA graph leaves nothing behind when it is recorded, and computes what was recorded, in the same memory, when it is
  replayed; what would wait for the device cannot be recorded;
- our Triton kernels are their PyTorch references, and FlashInfer is `fake_flashinfer`.

All else happens at once and in order: what one stream does too early for another is not seen, nor is pinned memory
that is written to while a copy from it is under way. PyTorch's C++ takes the tensors for those of a backend written in
Python, as it would look for a driver otherwise; Python is told cuda:0. Some of what this uses is private to torch; it
works with 2.11 and 2.13.
"""

import contextlib
import functools
import importlib
import inspect
import math
from types import SimpleNamespace

import torch
import torch._dynamo  # which looks at torch.cuda as it was
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

aten = torch.ops.aten
_INNER = torch.device("privateuseone:0")
_NUM_BYTES = 8 << 30
OPERATION_MS = 1e6
"""Long enough that no host takes as long."""
_COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_ON_GPUS_ONLY = {
    aten.mm.dtype: lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)),
    aten.histc.default: lambda x, *args, **kwargs: torch.histc(x.float(), *args, **kwargs).to(x.dtype),
}
_WAIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_KERNELS = {  # by module, those with a reference of the same name
    "lora": ["add_lora"],
    "rotary": ["rope_and_cache"],
    "sampling": ["draw"],
    "tokenwise": ["gated_activation", "add_rms_norm"],
}


class RefusedError(RuntimeError):
    """What CUDA would have refused."""


# ---- tensors ---------------------------------------------------------------------------------------------------------


class CudaTensor(torch.Tensor):
    """Says cuda:0; its values are those of `host`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda:0"))
    is_cuda = property(lambda self: True)

    @staticmethod
    def __new__(cls, host):
        options = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        with torch.inference_mode(host.is_inference()):
            tensor = torch.Tensor._make_wrapper_subclass(cls, host.shape, **options, device=_INNER)
        tensor.host = host
        return tensor

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)]._is_param = isinstance(self, torch.nn.Parameter)
        return memo[id(self)]

    def untyped_storage(self):
        return self.host.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func, _, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Those that make tensors out of nothing come here, too."""

    def __torch_dispatch__(self, func, _, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


def _on_cuda(device):
    return device is not None and torch.device(device).type in ("cuda", _INNER.type)


def _dispatch(func, args, kwargs):
    leaves = tree_leaves((args, kwargs))
    ours = any(isinstance(x, CudaTensor) for x in leaves)
    device = next((x for x in leaves if isinstance(x, torch.device)), None)
    if not ours and not _on_cuda(device):
        return func(*args, **kwargs)
    with _Operations():  # what inference mode has not taken apart
        result = func.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    foreign = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, CudaTensor)]
    if func is aten.copy_.default and not isinstance(args[0], CudaTensor):
        return _copy_to_host(args[0], args[1].host, kwargs.get("non_blocking", args[2:] == (True,)))
    if func is aten._to_copy.default and ours and device is not None and not _on_cuda(device):
        host = torch.empty_like(args[0].host, dtype=kwargs.get("dtype"))
        return _copy_to_host(host, args[0].host, kwargs.get("non_blocking", False))
    if func not in _COPIES:
        _check_devices(func, args, foreign)
    elif _now.graph is not None and not all(getattr(x, "pinned", False) for x in foreign):
        raise RefusedError(f"{func} from memory that is not pinned cannot be recorded")
    if _waits(func, args, kwargs):
        _wait(func)
    func = _ON_GPUS_ONLY.get(func, func)
    return _compute(func, args, kwargs | {"device": torch.device("cpu")} if _on_cuda(device) else kwargs)


def _check_devices(func, args, foreign):
    """CUDA takes numbers that lie on the CPU, and indices outside of graphs."""
    if func in _INDEXING and isinstance(args[0], CudaTensor) and _now.graph is None:
        foreign = [x for x in foreign if all(x is not index for index in args[1])]
    takes_numbers = torch.Tag.pointwise in func.tags or func in _INDEXING
    if any(x.dim() or not takes_numbers or (func._schema.is_mutable and x is args[0]) for x in foreign):
        raise RefusedError(f"{func}: expected all tensors on one device, found some on cuda:0 and some on the CPU")


def _waits(func, args, kwargs):
    """Whether the host must know values to go on."""
    if func in _INDEXING:
        return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return not _WAIT.isdisjoint(func.tags) and kwargs.get("output_size") is None


def _wait(what):
    if _now.graph is not None:
        raise RefusedError(f"{what} waits for the device and cannot be recorded")
    if _now.sync_debug_mode == "error":
        raise RefusedError(f"{what} waits for the device, which is forbidden now")
    _now.stream.synchronize()


def _compute(function, args, kwargs):
    """A function of the tensors behind ours, now and whenever the graph being recorded is replayed."""
    leaves, spec = tree_flatten((args, kwargs))
    wrappers = {id(x.host): x for x in leaves if isinstance(x, CudaTensor)}
    args, kwargs = tree_unflatten([x.host if isinstance(x, CudaTensor) else x for x in leaves], spec)
    result = function(*args, **kwargs)
    _now.num_operations += 1
    if _now.graph is not None:
        memory = {x.host.untyped_storage().data_ptr() for x in wrappers.values()}
        _now.graph.record(functools.partial(function, *args, **kwargs), result, memory)

    def wrap(x):
        if not isinstance(x, torch.Tensor):
            return x
        return wrappers[id(x)] if id(x) in wrappers else CudaTensor(x)

    return tree_map(wrap, result)


def _copy_to_host(target, source, lazily):
    if not lazily or _now.graph is not None:
        _wait("a copy to the host")
        return target.copy_(source)
    _now.stream.copies = [*(copy for copy in _now.stream.copies if not copy.done), _Copy(target, source.clone())]
    return target.fill_(77)  # neither 0 nor NaN, which might pass for a result or be handled as an error


# ---- streams, events, graphs -----------------------------------------------------------------------------------------


class _Copy:
    """To the host, under way until somebody waits for it."""

    def __init__(self, target, values):
        self._target, self._values, self.done = target, values, False

    @torch.inference_mode()
    def finish(self):
        if not self.done:
            self._target.copy_(self._values)
        self.done = True


class Stream:
    def __init__(self, *_, **__):
        self.copies = []

    def synchronize(self):
        for copy in self.copies:
            copy.finish()

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def wait_stream(self, _): ...

    def wait_event(self, _): ...


class Event(Stream):
    """A stream's copies up to some moment, and the number of operations up to it: each takes the device OPERATION_MS.
    CUDA refuses the time between two events before the host has waited for both, or for a later one."""

    def __init__(self, enable_timing=False):
        super().__init__()
        self._timed = enable_timing

    def record(self, stream=None):
        self.copies = list((stream or _now.stream).copies)
        _now.num_events += 1
        self._number, self._operations = _now.num_events, _now.num_operations

    def synchronize(self):
        super().synchronize()
        _now.num_reached = max(_now.num_reached, getattr(self, "_number", 0))

    def elapsed_time(self, end):
        if not (self._timed and end._timed) or max(self._number, end._number) > _now.num_reached:
            raise RefusedError("the device has not reached both events, or one has no time")
        return OPERATION_MS * (end._operations - self._operations)


@contextlib.contextmanager
def _use_stream(stream):
    before, _now.stream = _now.stream, stream or _now.stream
    try:
        yield
    finally:
        _now.stream = before


class Graph:
    def __init__(self):
        self._steps, self._fresh = [], []

    @contextlib.contextmanager
    def recorded(self, *, stream=None, **_):
        """`torch.cuda.graph` of this graph."""
        _now.graph = self
        try:
            with _use_stream(stream):
                yield
        finally:
            _now.graph = None
            with torch.inference_mode():
                for tensor in self._fresh:
                    tensor.fill_(math.nan if tensor.is_floating_point() else 0)

    def record(self, compute, result, memory):
        """A computation from `memory`; replayed, what it makes anew goes to where it went the first time."""
        targets = {i: x for i, x in enumerate(tree_leaves(result)) if isinstance(x, torch.Tensor)}
        targets = {i: x for i, x in targets.items() if x.untyped_storage().data_ptr() not in memory}
        self._fresh += targets.values()

        def step():
            again = tree_leaves(compute())
            for i, target in targets.items():
                target.copy_(again[i])

        self._steps.append(step)

    @torch.inference_mode()
    def replay(self):
        for step in self._steps:
            step()


_now = SimpleNamespace(
    stream=Stream(), graph=None, sync_debug_mode="default", num_operations=0, num_events=0, num_reached=0
)


# ---- torch -----------------------------------------------------------------------------------------------------------


class _Functions(TorchFunctionMode):
    """What asks for a driver, or for the device of a tensor, before it is an operation."""

    def __torch_function__(self, func, _, args=(), kwargs=None):
        return _FUNCTIONS.get(func, func)(*args, **(kwargs or {}))


def _to(x, *args, copy=False, **kwargs):
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype)
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
    device = _INNER if _on_cuda(device or x.device) else device or x.device
    layout = layout or torch.preserve_format
    return torch.Tensor.to(x, device, dtype or x.dtype, non_blocking, copy, memory_format=layout)


def _pin(x):
    pinned = x.clone()
    pinned.pinned = True
    return pinned


def _tensor(*args, device="cpu", **kwargs):
    return _to(torch.tensor(*args, **kwargs), device or "cpu")


def _attention(query, *args, **kwargs):
    if isinstance(query, CudaTensor):
        return aten._scaled_dot_product_attention_math(query, *args, **kwargs)[0]
    return torch.nn.functional.scaled_dot_product_attention(query, *args, **kwargs)


_FUNCTIONS = {
    torch.tensor: _tensor,
    torch.Tensor.to: _to,
    torch.Tensor.tolist: lambda x: torch.Tensor.tolist(_to(x, "cpu")),
    torch.Tensor.pin_memory: _pin,
    torch.Tensor.data_ptr: lambda x: torch.Tensor.data_ptr(x.host if isinstance(x, CudaTensor) else x),
    torch.nn.functional.scaled_dot_product_attention: _attention,
}


def install():
    """From now on this process has a GPU."""
    b = backend_registration
    parts = _now.kept_alive = b._DummyBackendModule(), b._DummyPrivateUse1Hook(), b._DummyDeviceGuard()
    b._setup_privateuseone_for_python_backend("pretended", *parts)
    torch._C._ensureCUDADeviceGuardSet()
    device = SimpleNamespace(multi_processor_count=4, uuid="0", total_memory=_NUM_BYTES)
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: device,
        "mem_get_info": lambda *_: (_NUM_BYTES, _NUM_BYTES),
        "current_stream": lambda *_: _now.stream,
        "set_stream": lambda stream: setattr(_now, "stream", stream),
        "stream": _use_stream,
        "synchronize": lambda *_: _now.stream.synchronize(),
        "get_sync_debug_mode": lambda: _now.sync_debug_mode,
        "set_sync_debug_mode": lambda mode: setattr(_now, "sync_debug_mode", mode),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": Graph.recorded,
    }
    nothing = ("_lazy_init", "set_device", "empty_cache", "ipc_collect", "graph_pool_handle")
    cuda |= dict.fromkeys(nothing, lambda *_: None)
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    _replace_kernels()
    _Functions().__enter__()
    _Operations().__enter__()


def _replace_kernels():
    import fake_flashinfer

    from inflight.engine.model.attention import flashinfer

    module = lambda name: importlib.import_module(f"inflight_kernels.{name}")  # noqa: E731
    for name, kernels in _KERNELS.items():
        for kernel in kernels:
            setattr(module(f"_{name}_triton"), kernel, _kernel(getattr(module(name), f"{kernel}_reference")))
    for name in ("dense_forward", "masked_forward", "grad_logits", "add_product", "segment_sum"):
        setattr(module("_linear_logprob_triton"), name, _kernel(getattr(module("_linear_logprob_cpu"), name)))
    module("_filters_triton").cut_logits = _kernel(_cut_logits)
    module("_filters_triton").penalize = _kernel(_penalize)
    module("_copy_triton").copy_all = lambda destinations, sources: (destinations, sources)
    module("_copy_triton").BlockTable.of = lambda groups: None
    copied_by_plan = ("starts", "indptr", "last_page_len")
    fake_flashinfer._Wrapper._attend = _kernel(fake_flashinfer._Wrapper._attend, on_host=copied_by_plan)
    flashinfer._flashinfer = lambda: fake_flashinfer
    importlib.import_module("transformers.integrations.moe")._grouped_mm = _grouped_mm


def _grouped_mm(input, weight, offs):
    """In place of PyTorch's grouped product, which takes fp32 on no GPU: without waiting for the offsets."""
    groups = (torch.arange(len(input), device=input.device)[:, None] >= offs).sum(1)
    return (input[:, None] @ weight[groups.clamp(max=len(weight) - 1)])[:, 0]


def _cut_logits(logits, rows, temperatures, top_ks, top_ps, min_ps):
    module = importlib.import_module("inflight_kernels.filters")
    module.cut_logits_reference(logits, module.Filters(rows, temperatures, top_ks, top_ps, min_ps))


def _penalize(logits, seen, rows, seen_rows, factors):
    module = importlib.import_module("inflight_kernels.filters")
    module.penalize_reference(logits, seen, module.Penalties(rows, seen_rows, factors))


def _kernel(reference, on_host=()):
    """One launch that computes the reference. Its arguments may come by position or by name."""
    parameters = list(inspect.signature(reference).parameters)

    def launch(*args, **kwargs):
        kwargs |= dict(zip(parameters, args, strict=False))
        on_device = tree_leaves([value for name, value in kwargs.items() if name not in on_host])
        if any(isinstance(x, torch.Tensor) and not isinstance(x, CudaTensor) for x in on_device):
            raise RefusedError(f"{reference.__qualname__}: a kernel cannot read memory of the CPU")
        return _compute(reference, (), kwargs)

    return launch
