"""A device beside the CPU that every machine has: its tensors only say that they are elsewhere.

They lie on the CPU and are computed there, but tensors of both devices don't mix, as on a GPU: an
operation on them raises what CUDA's would. PyTorch's ``lazy`` lends its name, since no library has
to be loaded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ELSEWHERE = torch.device("lazy", 0)
_aten = torch.ops.aten
_COPIES = {
    _aten.copy_.default,
    _aten._to_copy.default,
    _aten._foreach_copy_.default,
    _aten._local_scalar_dense.default,
}
_INDEXED = {  # by tensors of any device
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}


class FarTensor(Tensor):
    """A tensor that says it lies on the other device."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> FarTensor:
        """Wrap a tensor of the CPU."""
        tensor = Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            layout=near.layout,
            device=ELSEWHERE,
        )
        tensor.near = near
        return tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor as ``map_location="cpu"`` would load it."""
        return self.near.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.tolist:
            return args[0].near.tolist()
        if function in (Tensor.numpy, Tensor.__array__):
            raise TypeError("can't convert a tensor of another device to numpy")
        if function == Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0].near = args[1].near
        if function is Tensor.__getitem__ and isinstance(args[1], list):
            args = args[0], torch.tensor(args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(function, args, kwargs or {})


def _computed(function: Any, args: Any, kwargs: Any) -> Any:
    """Compute on the CPU what happens on the other device."""
    tensors: list[Tensor] = []
    near = _mapped(lambda tensor: tensors.append(tensor) or _near(tensor), (args, kwargs))
    far = any(isinstance(tensor, FarTensor) for tensor in tensors)
    if far and function not in _COPIES:
        checked = args[::2] if function in _INDEXED else tensors
        for tensor in checked:
            if not isinstance(tensor, FarTensor) and tensor.dim() > 0:
                places = [(str(tensor.device), tuple(tensor.shape)) for tensor in tensors]
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, {function} got {places}"
                )
    args, kwargs = near
    if kwargs.get("device") is not None:
        far = torch.device(kwargs["device"]).type == ELSEWHERE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    own = {id(_near(tensor)): tensor for tensor in tensors}  # what is changed in place

    def wrapped(value: Tensor) -> Tensor:
        return own[id(value)] if id(value) in own else FarTensor(value) if far else value

    return _mapped(wrapped, function(*args, **kwargs))


def _near(tensor: Tensor) -> Tensor:
    return tensor.near if isinstance(tensor, FarTensor) else tensor


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to all tensors in arguments or results; faster than for any tree."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(function, one) for one in value])
    if isinstance(value, dict):
        return {key: _mapped(function, one) for key, one in value.items()}
    return value


def _any_far(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, FarTensor) or (isinstance(value, (list, tuple)) and _any_far(value))
        for value in values
    )


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), "CompositeImplicitAutograd"
        ):
            with self:
                return function.decompose(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        there = torch.device(kwargs.get("device") or "cpu").type == ELSEWHERE.type
        if there or _any_far((*args, *kwargs.values())):
            return _computed(function, args, kwargs)
        return function(*args, **kwargs)


class _Elsewhere(Accelerator):
    """Lets Lightning train on the other device."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [ELSEWHERE]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return ELSEWHERE.type


def strategy() -> SingleDeviceStrategy:
    """Return a Trainer's strategy for the other device."""
    return SingleDeviceStrategy(device=ELSEWHERE, accelerator=_Elsewhere())


@contextmanager
def other_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a second device for a while."""
    autocast = torch.autocast

    def known(kind: str, *args: Any, **kwargs: Any) -> Any:
        return autocast("cpu" if kind == ELSEWHERE.type else kind, *args, **kwargs)

    def moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            return make(*args, **kwargs).to(device or "cpu")

        return made

    with monkeypatch.context() as patch, _Mode():
        patch.setattr(torch, "autocast", known)
        patch.setattr(torch, "tensor", moved(torch.tensor))  # they look at no mode
        patch.setattr(torch, "as_tensor", moved(torch.as_tensor))
        yield
