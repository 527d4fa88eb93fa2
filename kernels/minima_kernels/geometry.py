"""Shape of the KV cache and the unit in which page addresses count."""

from __future__ import annotations

from dataclasses import dataclass

GRANULE = 128
"""Bytes per unit of a page address; a page starts and ends at a multiple of it."""

ALIGNMENT = 16
"""Bytes to which a layer's share of a page, and each part of that share, is aligned.

Sixteen bytes let a gather move whole vectors, and make every integer view of a part legal.
"""


def align(num_bytes: int, alignment: int) -> int:
    """Smallest multiple of ``alignment`` that is not below ``num_bytes``."""
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class KVGeometry:
    """Shape of the KV cache of one model.

    ``num_kv_heads`` counts the KV heads stored on this device, ``page_size`` the tokens of a page.

    Raises:
        ValueError: a count below one, or a ``head_dim`` that is not a multiple of eight (rows of
            one-byte codes are then no whole number of 8-byte words).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, not {getattr(self, field)}")
        if self.head_dim % 8:
            raise ValueError(f"head_dim must be a multiple of 8, not {self.head_dim}")

    @property
    def values_per_layer(self) -> int:
        """K and V values that one page holds of one layer."""
        return 2 * self.page_size * self.num_kv_heads * self.head_dim
