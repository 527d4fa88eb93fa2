"""The seam between a model and whoever stores its KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from minima_kernels.cpu.stack import DecodeStep


class AttentionBackend(Protocol):
    """Stores the keys and values of a batch and attends over them; one call per layer and step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of one layer, softmax scale head_dim ** -0.5.

        Args:
            layer: index in [0, num_layers); calls come in this order.
            q: [N, num_heads, head_dim] after norm and RoPE, contiguous.
            k: [N, num_kv_heads, head_dim] after norm and RoPE, contiguous.
            v: [N, num_kv_heads, head_dim], possibly a strided view.

        Returns:
            [N, num_heads, head_dim], dtype of q.
        """
        ...


class RopeBackend(ABC):
    """A backend that applies RoPE itself, in the kernel that stores the keys."""

    @abstractmethod
    def attend_unturned(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """`AttentionBackend.attend` of q and k before RoPE.

        Args:
            q, k, v: possibly views with strided rows; heads and channels are contiguous.
            cos, sin: as `layers.rotate` takes them.
        """


class StepBackend(ABC):
    """A backend whose work native layers can do themselves."""

    @abstractmethod
    def decode_step(self) -> DecodeStep | None:
        """What takes the place of the calls of `attend` for the batch at hand; None where there
        is no other way than these."""
