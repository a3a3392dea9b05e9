"""Tensors of the fake devices: a tensor of the host under another device's name.

Their operations come to `CudaTensor.__torch_dispatch__` in every thread; those that make tensors of nothing are
registered for torch's dispatch key of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors

from . import guard, memory, streams

FACTORIES = (
    *("empty", "zeros", "ones", "full", "arange", "linspace", "logspace", "eye", "range", "scalar_tensor"),
    *("tril_indices", "triu_indices", "hann_window", "hamming_window", "blackman_window"),
    *("rand", "randn", "randint", "randperm", "empty_strided"),
)
PINNABLE = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_strided", "empty_like", "zeros_like", "rand")
WAITS = {  # operations with a result that the host needs
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
    *("is_nonzero", "allclose", "nonzero_numpy"),
}
WHOLE = {"stft"}  # made of operations of which one changes a tensor's shape in place
READ_ANYWHERE = {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_"}
LARGE_BYTES = 1 << 20
aten = torch.ops.aten
_libraries: list[Any] = []  # their end would take the registrations back


class CudaTensor(Tensor):
    """A tensor on a fake device; `inner` holds its elements."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> CudaTensor:
        with torch.inference_mode(False):  # views of tensors that were made outside must be such as well
            tensor = Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=device,
            )
        tensor.inner = inner
        memory.count(inner, device.index)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_composite(function):  # in inference mode these come whole
            return function.decompose(*args, **(kwargs or {}))
        return run(function, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self._on_device(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(self._on_device(index), value)

    def _on_device(self, index: Any) -> Any:
        """Make tensors of lists in an index: torch would copy them to the device without our dispatch."""
        if type(index) is tuple:
            return tuple(map(self._on_device, index))
        return torch.tensor(index, device=self.device) if isinstance(index, list | np.ndarray) else index

    def new_tensor(self, data: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def is_pinned(self, device: object = None) -> bool:
        return False

    def pin_memory(self, device: object = None) -> Tensor:
        raise RuntimeError("cannot pin a tensor of a device; only dense CPU tensors can be pinned")

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied: Tensor = CudaTensor(self.inner.clone(), self.device)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.inner!r} on {self.device}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("the fake device's tensors cannot be sent to other processes")


def full_device(device: torch.device | str | int) -> torch.device:
    """Return the device with its index; an index is that of a CUDA device."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    is_full = device.type != "cuda" or device.index is not None
    return device if is_full else torch.device("cuda", streams.current_device())


@cache
def is_composite(function: Any) -> bool:
    """Whether an operation is made of others, whatever the device."""
    name: str = function.name()
    is_made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return is_made_of_others and function.overloadpacket.__name__ not in WHOLE


def inner_of(value: Any) -> Any:
    """Replace tensors of a fake device by those that they hold, inside lists, too."""
    if isinstance(value, CudaTensor):
        return value.inner
    if type(value) in (list, tuple):
        return type(value)(map(inner_of, value))
    return value


def tensors_in(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += tensors_in(value)
    return found


def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation of which one tensor at least is on a fake device; in a capture record it."""
    name = function.overloadpacket.__name__
    given = tensors_in([*args, *kwargs.values()])
    here = [each for each in given if isinstance(each, CudaTensor)]
    device, target = here[0].device, kwargs.get("device")
    _check_devices(name, given, device)
    if name == "_fused_sdp_choice":
        return 0  # the host's choice would name kernels of the host
    if _waits(name, args, kwargs):
        streams.host_waits(name)
    inner_args = tuple(map(inner_of, args))
    inner_kwargs = {key: inner_of(value) for key, value in kwargs.items()}
    if target is not None:
        inner_kwargs["device"] = torch.device("cpu")
        device = full_device(target)
    if inner_kwargs.get("pin_memory"):
        inner_kwargs["pin_memory"] = False
    outer_by_inner = {id(inner_of(each)): each for each in given}
    if device.type == "meta":
        return function(*inner_args, **{**inner_kwargs, "device": device})
    if name == "histc" and not inner_args[0].is_floating_point():  # the host counts no integers
        return run(function, (args[0].float(), *args[1:]), kwargs).to(args[0].dtype)
    result = _launch(function, inner_args, inner_kwargs)
    if function._schema.is_mutable:
        for each in here:
            _check_shape(name, each)
    return _wrapped(result, outer_by_inner, device)


def make(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a factory for a fake device."""
    device = full_device(kwargs.pop("device"))
    kwargs.pop("pin_memory", None)
    like: Tensor = function(*args, **{**kwargs, "device": torch.device("meta")})
    memory.check(device.index, like.nbytes)
    if function.overloadpacket is aten.zeros and like.nbytes >= LARGE_BYTES and streams.capture() is None:
        return CudaTensor(memory.untouched_zeros(like), device)
    return _wrapped(_launch(function, args, {**kwargs, "device": torch.device("cpu")}), {}, device)


def _launch(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on inner tensors. In a capture record it; run it only if it makes tensors, for their shapes."""
    capture = streams.capture()
    if capture is None:
        return function(*args, **kwargs)
    name, schema = function.overloadpacket.__name__, function._schema
    if function.namespace == "c10d":  # every rank captures it
        capture.append(lambda: _finish(function(*args, **kwargs)))
        return function(*args, **kwargs)
    if schema.is_mutable and all(each.alias_info is not None for each in schema.returns):
        capture.append(lambda: function(*args, **kwargs))
        written = [value for value, argument in _with_arguments(schema, args, kwargs) if _is_written(argument)]
        return written[0] if len(schema.returns) == 1 else tuple(written)
    result = function(*args, **kwargs)
    made = [each for each in tensors_in([result]) if not _is_view(each, args, kwargs)]
    if name.startswith(("empty", "new_empty")):
        for each in made:
            each.zero_()  # a captured operation may index by these elements
    elif made:

        def again() -> None:
            fresh = [each for each in tensors_in([function(*args, **kwargs)]) if not _is_view(each, args, kwargs)]
            for target, source in zip(made, fresh, strict=True):
                target.copy_(source)

        capture.append(again)
    return result


def _finish(result: Any) -> None:
    """Wait for a collective: torch's functions do so only where they start one."""
    dist.Work.unbox(result[-1] if type(result) in (list, tuple) else result).wait()


def _with_arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    places = {argument.name: argument for argument in schema.arguments}
    by_place = list(zip(args, schema.arguments, strict=False))
    return by_place + [(value, places[key]) for key, value in kwargs.items()]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_view(tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it has the memory of an argument."""
    storage = tensor.untyped_storage()._cdata
    return any(each.untyped_storage()._cdata == storage for each in tensors_in([*args, *kwargs.values()]))


def _wrapped(result: Any, outer_by_inner: dict[int, Tensor], device: torch.device) -> Any:
    if isinstance(result, Tensor):
        if (outer := outer_by_inner.get(id(result))) is not None:
            return outer
        return result if device.type != "cuda" or isinstance(result, CudaTensor) else CudaTensor(result, device)
    if type(result) in (list, tuple):
        return type(result)(_wrapped(each, outer_by_inner, device) for each in result)
    return result


def _check_devices(name: str, given: list[Tensor], device: torch.device) -> None:
    """Raise RuntimeError for tensors of several devices, as CUDA does. A host's number may be anywhere."""
    if name in READ_ANYWHERE:
        return
    for each in given:
        if each.device != device and (each.dim() or isinstance(each, CudaTensor)):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {device} and "
                f"{each.device}! (when running {name} on a fake device)"
            )


def _check_shape(name: str, tensor: CudaTensor) -> None:
    inner = tensor.inner
    if inner.shape != tensor.shape or inner.stride() != tensor.stride():
        raise NotImplementedError(f"the fake device cannot change a tensor's shape in place, as {name} does")


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the device in this operation."""
    if name in WAITS:
        return True
    if name == "_to_copy":
        return str(kwargs.get("device")) == "cpu" and not kwargs.get("non_blocking")
    if name == "copy_":
        is_between = args[0].device.type != args[1].device.type
        is_blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        return is_between and is_blocking
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return any(each.dtype in (torch.bool, torch.uint8) or not each.is_cuda for each in tensors_in([args[1]]))
    return name == "repeat_interleave" and kwargs.get("output_size") is None


def install() -> None:
    """Register the factories, let torch start its fake device, and pin memory of the host."""
    guard.install()
    torch.cuda._lazy_init = lambda: None
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            function = getattr(packet, overload)
            arguments = [argument.name for argument in function._schema.arguments]
            if "device" in arguments and "out" not in arguments and "names" not in arguments:
                library.impl(function, _factory(function), "CUDA")
    others = torch.library.Library("_", "IMPL")
    others.fallback(lambda function, *args, **kwargs: run(function, args, kwargs), "CUDA")  # without our dispatch
    _libraries.extend((library, others))
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter on the host cannot become ours in place
    _device_constructors()  # `with torch.device(…)` knows the functions of its first use
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _first_on_host(getattr(torch, name)))
    for name in PINNABLE:
        setattr(torch, name, _pinning(getattr(torch, name)))
    Tensor.pin_memory = lambda self, device=None: memory.pin(self.clone())  # type: ignore[method-assign, assignment, misc]
    Tensor.is_pinned = lambda self, device=None: memory.is_pinned(self)  # type: ignore[method-assign, assignment, misc]


def _factory(function: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: make(function, args, kwargs)


def _first_on_host(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make tensors from Python's values on the host: torch copies them to their device without our dispatch."""

    def call(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if isinstance(data, Tensor) or device is None or full_device(device).type != "cuda":
            return function(data, *args, device=device, **kwargs)
        return function(data, *args, **kwargs).to(device)

    return call


def _pinning(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Take over `pin_memory`, which torch refuses without CUDA."""

    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = function(*args, **kwargs)
        return memory.pin(made) if pin_memory else made

    return call
