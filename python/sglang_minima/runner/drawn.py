"""Tokens on their way from the device to the host."""

from __future__ import annotations

import torch


class DrawnTokens:
    """Tokens that a device samples: good as input of what is launched next, awaited when the host
    wants them.

    Attributes:
        ids: int64 [rows] on the device; `NO_TOKEN` where there is none.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self._host = ids
        self._done: torch.cuda.Event | None = None
        if ids.is_cuda:
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> list[int]:
        """Token ids, one a row."""
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens
