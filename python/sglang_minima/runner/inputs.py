"""Inputs of decode steps at fixed device addresses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class FixedInputs:
    """Ids, positions, pages and slots of up to `most_rows` rows, copied in one piece.

    Two pinned buffers take turns, so that a step can be written while the copy of the one before
    it is under way.
    """

    def __init__(self, most_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._device = torch.zeros(4 * most_rows, dtype=torch.int64, device=device)
        self._hosts = [
            torch.zeros(4 * most_rows, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)
        ]
        self._events: list[torch.cuda.Event | None] = [None, None]
        if is_cuda:
            self._events = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Device memory held."""
        return self._device.nbytes

    def load(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        """int64 [4, rows] on the device; for equal numbers of rows at the same address."""
        self._turn ^= 1
        host, event = self._hosts[self._turn], self._events[self._turn]
        if event is not None:
            event.synchronize()
        count = values.size
        host.numpy()[:count] = values.ravel()
        fixed = self._device[:count]
        fixed.copy_(host[:count], non_blocking=True)
        if event is not None:
            event.record()
        return fixed.view(4, -1)
