"""Loading cubins and launching kernels through the CUDA driver.

The driver's C interface, called through ctypes: nothing to build against torch or Python, one cubin
for all versions of both. Launches go to torch's current stream and can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minima_kernels.cuda.cubin import read_cubin

_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_SIZE = 8
_PREFERRED_SHARED_CARVEOUT = 9


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_byte * 60),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        message = text.value.decode() if text.value else f"error {status}"
        raise DriverError(f"{what}: {message}")


class Function(NamedTuple):
    """A kernel of a loaded cubin, ready to launch."""

    handle: ctypes.c_void_p
    threads: tuple[int, int]
    shared_bytes: int

    def blocks_per_multiprocessor(self) -> int:
        """How many blocks fit on one multiprocessor."""
        count = ctypes.c_int()
        status = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(count),
            self.handle,
            self.threads[0] * self.threads[1],
            ctypes.c_size_t(self.shared_bytes),
        )
        _check(status, "occupancy of a kernel")
        return count.value


def load_function(
    cubin: Path, name: str, threads: tuple[int, int], has_shared: bool, device: torch.device
) -> Function:
    """Load a kernel on a device.

    ``has_shared``: the cubin says in ``shared_bytes`` how much dynamic shared memory it takes.

    Raises:
        DriverError: the cubin is not for this device, or has no such kernel.
        CubinDamaged: the file is not whole.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _load_function(cubin, name, threads, has_shared, index)


@cache
def _load_function(
    cubin: Path, name: str, threads: tuple[int, int], has_shared: bool, index: int
) -> Function:
    with torch.cuda.device(index):
        module = _load_module(cubin, index)
        handle = ctypes.c_void_p()
        status = _driver().cuModuleGetFunction(ctypes.byref(handle), module, name.encode())
        _check(status, f"kernel {name} of {cubin.name}")
        shared_bytes = _read_global(module, "shared_bytes") if has_shared else 0
        for attribute, value in (
            (_MAX_DYNAMIC_SHARED_SIZE, shared_bytes),
            (_PREFERRED_SHARED_CARVEOUT, 100),
        ):
            if has_shared:
                status = _driver().cuFuncSetAttribute(handle, attribute, value)
                _check(status, f"{shared_bytes} bytes of shared memory for {name}")
        return Function(handle, threads, shared_bytes)


@cache
def _load_module(cubin: Path, index: int) -> ctypes.c_void_p:
    torch.empty(1, device=torch.device("cuda", index))  # makes torch's context the current one
    module = ctypes.c_void_p()
    status = _driver().cuModuleLoadData(ctypes.byref(module), read_cubin(cubin))
    _check(status, f"loading {cubin}")
    return module


def _read_global(module: ctypes.c_void_p, name: str) -> int:
    address, size = ctypes.c_void_p(), ctypes.c_size_t()
    status = _driver().cuModuleGetGlobal_v2(
        ctypes.byref(address), ctypes.byref(size), module, name.encode()
    )
    _check(status, f"constant {name}")
    value = ctypes.c_int()
    status = _driver().cuMemcpyDtoH_v2(ctypes.byref(value), address, ctypes.c_size_t(4))
    _check(status, f"reading {name}")
    return value.value


Argument = torch.Tensor | int | float | None


class Launch:
    """A kernel with its grid and arguments; `call` launches it.

    Tensors among the arguments must stay where they are.
    """

    def __init__(
        self,
        function: Function,
        grid: tuple[int, int],
        arguments: Sequence[Argument],
        *,
        overlaps: bool,
    ) -> None:
        """``overlaps``: may start before the kernel in front of it has ended (programmatic
        dependent launch); the kernel itself waits where it has to."""
        self._function = function
        self._tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        self._values: list[Any] = [_convert(argument) for argument in arguments]
        pointers = [ctypes.addressof(value) for value in self._values]
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._config = _Config(
            grid=(grid[0], grid[1], 1),
            block=(*function.threads, 1),
            shared_bytes=function.shared_bytes,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=int(overlaps),
        )

    def set(self, index: int, value: float) -> None:
        """Change an argument: a number, or the address of a tensor."""
        self._values[index].value = value

    def resize(self, blocks: int) -> None:
        """Change the number of thread blocks along the first axis."""
        self._config.grid[0] = blocks

    def call(self, stream: int) -> None:
        """Launch on a stream (``torch.cuda.Stream.cuda_stream``)."""
        self._config.stream = stream
        status = _driver().cuLaunchKernelEx(
            ctypes.byref(self._config), self._function.handle, self._pointers, None
        )
        if status:
            _check(status, "launching a kernel")


def _convert(argument: Argument) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int(argument)
