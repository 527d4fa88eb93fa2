"""The block table of one live request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from minima_radix.node import Node
from minima_radix.types import Namespace


class RequestTable:
    """Which pages a request has, and how far it has written them."""

    __slots__ = (
        "bound_pages",
        "committed",
        "copy_hold",
        "namespace",
        "node",
        "pages",
        "priority",
        "sealed_pages",
    )

    def __init__(self, namespace: Namespace, pages: Sequence[int], priority: int) -> None:
        self.namespace = namespace
        self.priority = priority
        self.pages = array("q", pages)
        """Page addresses in logical order."""
        self.committed = 0
        """Tokens whose KV is written."""
        self.sealed_pages = len(pages)
        """Leading pages that are immutable."""
        self.bound_pages = len(pages)
        """Leading pages that are in the tree."""
        self.node: Node | None = None
        """Deepest tree node, locked; it ends with page `bound_pages`."""
        self.copy_hold: tuple[int, int] | None = None
        """(page, holder id) of the source of a copy on write."""
