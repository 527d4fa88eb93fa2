"""What the life cycle has done so far, for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class LifecycleCounters:
    """Counts of pages since the start."""

    evicted_pages: int = 0
    broken_pins: int = 0
    """Pins ended before their time because live requests needed the memory."""
    sealed_pages: int = 0
    deduplicated_pages: int = 0
    """Sealed pages that the tree had already."""
    retiered_pages: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Published conversions by (source kind, destination kind)."""
    compacted_pages: int = 0
    """Published moves within a kind."""
    copies_on_write: int = 0
    """Admissions that were given a partly matching page."""
