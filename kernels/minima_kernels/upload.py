"""Small tables from the host to a device, without waiting for the work that the device has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(
    values: Sequence[float] | Sequence[Sequence[float]] | np.ndarray,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The values as a tensor on the device, there for work that is launched from now on.

    A copy from ordinary memory to a GPU would first wait until the GPU has done all that it was
    given: this one goes through pinned memory, which torch keeps until the copy is done.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
