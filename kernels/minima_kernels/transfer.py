"""Moving pages between kinds: retier, copy on write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from minima_kernels.arena import gather, scatter
from minima_kernels.cpu.route import fallback_reason, reason_now
from minima_kernels.cpu.transfer import native_append, native_retier
from minima_kernels.cuda.retier import LayerShares, retier_layers, retier_reason
from minima_kernels.formats import AppendableFormat, Format
from minima_kernels.geometry import GRANULE, KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.routes import ROUTES, RouteCounters
from minima_kernels.shares import read_shares, write_shares
from minima_kernels.upload import upload

# Expanded values held at once while pages are re-encoded; about ten times that in bytes. On a GPU
# fewer would leave most of it idle.
_MAX_SCRATCH_VALUES = 1 << 21
_MAX_SCRATCH_VALUES_GPU = 1 << 25


class _LayerRun(NamedTuple):
    """Consecutive layers with one format in the source kind and one in the destination kind."""

    first_layer: int
    num_layers: int
    source: Format
    destination: Format


def _layer_runs(source: PageKind, destination: PageKind) -> Iterator[_LayerRun]:
    if len(source.formats) != len(destination.formats):
        raise ValueError(
            f"kinds {source.name!r} and {destination.name!r} differ in their layer counts"
        )
    pairs = list(zip(source.formats, destination.formats, strict=True))
    first = 0
    for layer in range(1, len(pairs) + 1):
        if layer == len(pairs) or pairs[layer] != pairs[first]:
            yield _LayerRun(first, layer - first, *pairs[first])
            first = layer


def retier(
    arena: torch.Tensor,
    source_addresses: torch.Tensor | Sequence[int],
    source_kind: PageKind,
    destination_addresses: torch.Tensor | Sequence[int],
    destination_kind: PageKind,
    geometry: KVGeometry,
    *,
    routes: RouteCounters = ROUTES,
) -> None:
    """Re-encode whole pages, all layers, into pages of another kind.

    Layers of one format in both kinds are copied byte for byte. The rotated basis is common to
    all formats, so nothing is rotated. Scratch is bounded whatever the number of pages.

    Args:
        arena: uint8 ``[bytes]``, holds sources and destinations; the pages must not overlap.
        source_addresses, destination_addresses: P page addresses each, in granules; given as
            numbers, they cost no wait for a GPU.

    Raises:
        ValueError: unequal numbers of addresses, or kinds of unequal layer counts.
    """
    sources, destinations = (
        addresses.to(arena.device, torch.int64)
        if isinstance(addresses, torch.Tensor)
        else upload(addresses, torch.int64, arena.device)
        for addresses in (source_addresses, destination_addresses)
    )
    if sources.shape != destinations.shape:
        raise ValueError(f"{sources.numel()} source pages for {destinations.numel()} destinations")
    if not sources.numel():
        return
    runs = list(_layer_runs(source_kind, destination_kind))
    formats = (*source_kind.formats, *destination_kind.formats)
    reason = reason_now(fallback_reason(formats, geometry, arena.device))
    if reason is None:
        routes.count("retier", "native")
        threads = torch.get_num_threads()
        native_retier(
            arena, sources, source_kind, destinations, destination_kind, geometry, threads
        )
        return
    if arena.is_cuda:
        reason = reason_now(retier_reason(set(formats), geometry, arena.device))
        if reason is None:
            routes.count("retier", "cuda")
            _cuda_retier(
                arena, sources, source_kind, destinations, destination_kind, runs, geometry
            )
            return
    routes.count("retier", "torch", reason)
    most_values = _MAX_SCRATCH_VALUES_GPU if arena.is_cuda else _MAX_SCRATCH_VALUES
    for run in runs:
        size = run.source.layer_bytes(geometry)
        new_size = run.destination.layer_bytes(geometry)
        layers_per_tile = max(1, most_values // geometry.values_per_layer)
        layers_per_tile = min(layers_per_tile, run.num_layers)
        pages_per_tile = max(1, most_values // (geometry.values_per_layer * layers_per_tile))
        for first in range(0, run.num_layers, layers_per_tile):
            count = min(layers_per_tile, run.num_layers - first)
            offset = source_kind.layer_offset(run.first_layer + first, geometry)
            new_offset = destination_kind.layer_offset(run.first_layer + first, geometry)
            for old, new in zip(
                sources.split(pages_per_tile), destinations.split(pages_per_tile), strict=True
            ):
                if run.source == run.destination:
                    scatter(arena, new, new_offset, gather(arena, old, offset, size * count))
                    continue
                data = read_shares(arena, old, run.source, offset, geometry, count)
                k, v = run.source.decode(data.view(-1, size), geometry)
                encoded = run.destination.encode(k, v, geometry).view(-1, new_size * count)
                write_shares(arena, new, run.destination, new_offset, geometry, encoded)


def _cuda_retier(
    arena: torch.Tensor,
    sources: torch.Tensor,
    source_kind: PageKind,
    destinations: torch.Tensor,
    destination_kind: PageKind,
    runs: Sequence[_LayerRun],
    geometry: KVGeometry,
) -> None:
    for run in runs:
        offset = source_kind.layer_offset(run.first_layer, geometry)
        new_offset = destination_kind.layer_offset(run.first_layer, geometry)
        if run.source == run.destination:
            size = run.source.layer_bytes(geometry) * run.num_layers
            scatter(arena, destinations, new_offset, gather(arena, sources, offset, size))
            continue
        old = LayerShares(sources, run.source, offset)
        new = LayerShares(destinations, run.destination, new_offset)
        retier_layers(arena, old, new, run.num_layers, geometry)


def append_tokens(
    kind: PageKind,
    layer: int,
    arena: torch.Tensor,
    page_bytes: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    geometry: KVGeometry,
    *,
    lacking: str = "",
    routes: RouteCounters = ROUTES,
) -> None:
    """Write one layer's K and V of N new tokens into open pages of a kind.

    Args:
        arena: uint8 ``[bytes]``.
        page_bytes: int64 ``[N]``, where in the arena the page of each token starts.
        slots: int64 ``[N]``, the token's place in its page.
        k, v: rotated, float ``[N, H, D]``.
        lacking: why a GPU's own kernel (``CudaAppend``) is not used; counted where torch serves.

    Raises:
        ValueError: pages of this kind cannot be appended to.
    """
    format_ = kind.formats[layer]
    if not isinstance(format_, AppendableFormat):
        raise ValueError(f"pages of kind {kind.name!r} cannot be appended to")
    shares = page_bytes + kind.layer_offset(layer, geometry)
    reason = reason_now(fallback_reason((format_,), geometry, arena.device))
    if reason is None:
        routes.count("append", "native")
        threads = torch.get_num_threads()
        native_append(format_, arena, shares, slots, k, v, geometry, threads)
        return
    routes.count("append", "torch", reason or lacking)
    format_.append(arena, shares, slots, k, v, geometry)


def copy_tokens(
    arena: torch.Tensor,
    source_address: int,
    source_kind: PageKind,
    destination_address: int,
    destination_kind: PageKind,
    num_tokens: int,
    geometry: KVGeometry,
) -> None:
    """Copy on write: the first ``num_tokens`` tokens of a sealed page into an appendable page.

    Layers of one format in both kinds are copied byte for byte, the page's other tokens with
    them (those slots are the destination's to overwrite); others are decoded and appended.

    Raises:
        ValueError: more tokens than a page holds, or a destination that is not appendable.
    """
    if not 0 <= num_tokens <= geometry.page_size:
        raise ValueError(f"{num_tokens} tokens are not 0 to {geometry.page_size}")
    source = upload([source_address], torch.int64, arena.device)
    destination = upload([destination_address], torch.int64, arena.device)
    slots = torch.arange(num_tokens, device=arena.device)
    for run in _layer_runs(source_kind, destination_kind):
        if not isinstance(run.destination, AppendableFormat):
            raise ValueError(f"pages of kind {destination_kind.name!r} cannot be appended to")
        size = run.source.layer_bytes(geometry)
        offset = source_kind.layer_offset(run.first_layer, geometry)
        new_offset = destination_kind.layer_offset(run.first_layer, geometry)
        if run.source == run.destination:
            data = gather(arena, source, offset, size * run.num_layers)
            scatter(arena, destination, new_offset, data)
            continue
        data = read_shares(arena, source, run.source, offset, geometry, run.num_layers)
        k, v = run.source.decode(data.view(-1, size), geometry)
        for index in range(run.num_layers):
            start = new_offset + index * run.destination.layer_bytes(geometry)
            byte_offsets = (destination * GRANULE + start).expand(num_tokens)
            run.destination.append(
                arena, byte_offsets, slots, k[index, :num_tokens], v[index, :num_tokens], geometry
            )


def read_page(
    arena: torch.Tensor, address: int, kind: PageKind, layer: int, geometry: KVGeometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer of one page: rotated, float32 ``[page_size, H, D]`` each."""
    format_ = kind.formats[layer]
    addresses = upload([address], torch.int64, arena.device)
    offset = kind.layer_offset(layer, geometry)
    data = read_shares(arena, addresses, format_, offset, geometry)
    k, v = format_.decode(data, geometry)
    return k[0], v[0]
