"""Host work of attention: from segments to work lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind

Int64Array = npt.NDArray[np.int64]

DEFAULT_SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class Segment:
    """A run of pages of one kind that the same requests read.

    A run that several requests share appears once, with all of them as readers; nested tree nodes
    are several segments. All pages are full but the last, whose first ``last_page_len`` tokens
    are valid.

    Attributes:
        addresses: page addresses in granules, in order of position.
        kind_index: index into the ``kinds`` given to the plan.
        last_page_len: tokens in the last page, 1 to page_size.
        readers: request indices.
    """

    addresses: torch.Tensor | Int64Array | Sequence[int]
    kind_index: int
    last_page_len: int
    readers: Sequence[int] | Int64Array


class CheckedSegment(NamedTuple):
    """A segment with its arrays on the host and its bounds checked."""

    addresses: Int64Array
    kind_index: int
    last_page_len: int
    readers: Int64Array


def check_segment(
    segment: Segment, num_requests: int, kinds: Sequence[PageKind], geometry: KVGeometry
) -> CheckedSegment:
    """Convert a segment to host arrays.

    Raises:
        ValueError: a reader, kind or page length out of range.
    """
    addresses = segment.addresses
    if isinstance(addresses, torch.Tensor):
        addresses = addresses.cpu().numpy()
    readers = np.asarray(segment.readers, dtype=np.int64)
    if not 0 <= segment.kind_index < len(kinds):
        raise ValueError(f"kind index {segment.kind_index} is not below {len(kinds)}")
    if not 1 <= segment.last_page_len <= geometry.page_size:
        raise ValueError(f"last_page_len {segment.last_page_len} is not 1 to {geometry.page_size}")
    if readers.size and not (readers.min() >= 0 and readers.max() < num_requests):
        raise ValueError(f"a reader of a segment is not one of the {num_requests} requests")
    return CheckedSegment(
        np.asarray(addresses, dtype=np.int64), segment.kind_index, segment.last_page_len, readers
    )
