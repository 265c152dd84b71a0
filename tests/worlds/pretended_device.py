"""A device that does not exist: tensors that live in this machine's memory and say that they do not.

Invariant: an operation that mixes them with tensors of the host raises, as on a GPU; numbers are those of the CPU. So a
test without a GPU shows that nothing is left on the host. It shows nothing about kernels, precision, speed or memory.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Thread
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

NAME: Final = "meta"  # the only device name that torch knows everywhere and has no kernels for
_ACROSS: Final = {"aten::copy_", "aten::_to_copy", "aten::to"}
_TAKE_HOST_INDICES: Final = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class DeviceTensor(torch.Tensor):
    """A tensor of the pretended device."""

    host: Tensor  # its numbers

    @staticmethod
    def __new__(cls: type["DeviceTensor"], host: Tensor) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME),
        )

    def __init__(self, host: Tensor) -> None:
        self.host = host

    def __repr__(self, **_: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"DeviceTensor({self.host!r})"

    def tolist(self) -> Any:  # torch refuses to for any subclass
        return self.host.tolist()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    def new_tensor(self, data: Any, **settings: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return DeviceTensor(self.host.new_tensor(data, **settings))

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert a tensor of the device to numpy; use Tensor.cpu() first")
        return self.host.numpy()

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One operation, where some argument or its result may be of the device."""
    given = list(_leaves((*args, *kwargs.values())))
    on_device = any(isinstance(value, DeviceTensor) for value in given)
    wanted = next((value for value in given if isinstance(value, torch.device)), None)
    goes_there = on_device if wanted is None else wanted.type == NAME
    if not on_device and not goes_there:
        return func(*args, **kwargs)
    name, is_alias = _known(func)
    if on_device and name not in _ACROSS:
        if name in _TAKE_HOST_INDICES:
            given = [args[0], *args[2:]]
        left = [tuple(t.shape) for t in given if isinstance(t, Tensor) and not isinstance(t, DeviceTensor) and t.dim()]
        if left:
            raise RuntimeError(f"{name}: expected all tensors on one device, but those of shape {left} are on the host")
    result = func(*_mapped(_hosted, args), **{key: _mapped(_hosted, value) for key, value in kwargs.items()})
    if name == "aten::copy_" and not isinstance(args[0], DeviceTensor):
        return args[0]
    if not goes_there:
        return result
    wrapped = _mapped(_wrapped, result)
    return return_and_correct_aliasing(func, args, dict(kwargs), wrapped) if on_device and is_alias else wrapped


@cache
def _known(func: Any) -> tuple[str, bool]:
    """Name of an operation, and whether what it returns may be what it was given, or a view of it."""
    return func._schema.name, any(each.alias_info is not None for each in func._schema.returns)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(cast("Iterable[Any]", value))
        else:
            yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_mapped(change, each) for each in value)
    return change(value)


def _hosted(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _wrapped(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) else value


class _Operations(TorchDispatchMode):
    """Operations that make tensors of the device from nothing, or from tensors of the host."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it means to import it: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def pretended_device() -> Generator[torch.device]:
    """The device, inside the block: for this thread and those that begin there."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter's numbers are of its Python object
    tensor, as_tensor, generator, run = torch.tensor, torch.as_tensor, torch.Generator, Thread.run

    def made(data: Any, *, device: Any = None, **settings: Any) -> Tensor:
        """`torch.tensor` gives what is to be on `meta` no numbers."""
        found = data.to(**settings) if isinstance(data, Tensor) else tensor(data, **settings)
        return found if device is None else found.to(device)

    class HostGenerator:
        def __new__(cls, device: object = "cpu") -> Any:
            return generator()

    def run_with_device(thread: Thread) -> None:
        with _Operations():
            run(thread)

    torch.tensor = torch.as_tensor = made
    torch.Generator, Thread.run = HostGenerator, run_with_device  # pyright: ignore
    try:
        with _Operations():
            yield torch.device(NAME)
    finally:
        torch.tensor, torch.as_tensor = tensor, as_tensor
        torch.Generator, Thread.run = generator, run  # pyright: ignore
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@contextmanager
def device_named(name: str) -> Generator[torch.device]:
    """`pretended`, or a device that torch knows."""
    if name != "pretended":
        yield torch.device(name)
        return
    with pretended_device() as device:
        yield device
