"""Words shared by the modules of the package: namespaces, reference kinds, errors."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Namespace(NamedTuple):
    """What besides the token ids a page depends on. Two namespaces never share or probe pages."""

    salt: str | None
    """The tenant's own key (`cache_salt` / `extra_key`)."""
    lora: str | None
    """Name of the adapter that computed the pages."""
    profile: str
    """Name of the page-kind profile: pages of another profile are other bytes."""


class ReferenceKind(IntEnum):
    """Who may hold a page. A page is free exactly when no reference of any kind is left."""

    REQUEST = 0
    """A live request has the page in its table; the holder is its rid."""
    CACHE = 1
    """The tree has the page; durable, it depends on no request."""
    CONVERSION = 2
    """A retier reads or fills the page, or a copy on write reads it."""
    READER = 3
    """A batch in flight may still read the page; taken by leases, never by `acquire`."""


class OutOfPages(Exception):
    """The pool has no page of the kind, and eviction could not make one.

    Attributes:
        needed_kind: the kind that was asked for.
        compactable_kind: the kind whose scattered free pages add up to whole slabs, or None. When
            set, moving `compaction_moves(compactable_kind, ...)` together and asking again
            succeeds without evicting or preempting anything more.
    """

    def __init__(self, needed_kind: str, compactable_kind: str | None = None) -> None:
        why = (
            "" if compactable_kind is None else f": free memory is scattered in {compactable_kind}"
        )
        super().__init__(f"no page of kind {needed_kind} is left{why}")
        self.needed_kind = needed_kind
        self.compactable_kind = compactable_kind

    @property
    def fragmented(self) -> bool:
        """Whether enough memory is free, only not in one slab."""
        return self.compactable_kind is not None


class PageReferenceError(Exception):
    """A reference was taken twice, released without being held, or names a page that is free."""


class LifecycleError(Exception):
    """A call that the page-transition protocol does not allow in the present state."""


class InvariantViolation(Exception):
    """The checker found the books wrong; `violations` has one sentence for each fault."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__(f"{len(violations)} violated: " + "; ".join(violations))
        self.violations = violations
