"""What the calls of tree and life cycle answer."""

from __future__ import annotations

from typing import NamedTuple

from minima_radix.node import Node


class MatchResult(NamedTuple):
    """The longest cached run of whole pages, and the page that matches partly."""

    node: Node | None
    """Node in which the run ends; None when no whole page matches."""
    pages: list[int]
    """Addresses of the whole pages, in order."""
    partial_page: int | None
    """Page that shares the next 1 .. page_size-1 tokens, the longest such run, or None."""
    partial_tokens: int
    node_pages: int
    """How many pages of `node` belong to the run."""


class InsertResult(NamedTuple):
    """Where inserted pages are now."""

    node: Node
    """Ends exactly with the last inserted page."""
    twins: list[int]
    """Pages that the tree already had for the first len(twins) pages: it keeps its own."""


class EvictedPage(NamedTuple):
    """A page that left the tree, and the node it was the last page of."""

    page: int
    node: Node


class Admission(NamedTuple):
    """What the cache gave a new request; all of it is referenced already."""

    cached_tokens: int
    """Tokens of the whole pages: the request starts with that many committed."""
    pages: list[int]
    partial_page: int | None
    """Source of a copy on write; held until `end_copy`."""
    partial_tokens: int
    """Leading tokens of that page that the request's next page shares."""


class Sealed(NamedTuple):
    """A page of a request that has become immutable."""

    position: int
    """Its index in the sequence, in pages."""
    page: int
    """The page that the request had filled."""
    replaced_by: int | None
    """The tree's page with the same tokens, which the request uses instead; `page` is released."""
