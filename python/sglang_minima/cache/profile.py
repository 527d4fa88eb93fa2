"""KV profiles: which page kind each tier uses, and which tier a page position has.

Tiers follow Minima-KV (section 3.1): Recent pages are the latest of a request, Anchors are the
protected first pages (attention sinks), everything between is Stale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minima_kernels import Format, KVGeometry, PageKind, parse_format
from sglang_minima.server_args import ServerArgs
from sglang_minima.settings import ArgumentError, parse_layers

_RAW_FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass(frozen=True)
class KvProfile:
    """Page kinds of the tiers; Recent and Anchor pages share one kind (FP8 in the papers)."""

    name: str
    recent: PageKind
    stale: PageKind
    anchor_pages: int
    """Leading pages of a sequence that never become Stale."""
    window_tokens: int
    """Latest tokens of a request whose pages stay Recent."""

    @property
    def kinds(self) -> tuple[PageKind, ...]:
        """Distinct kinds; the index in this tuple is the kind index of attention plans."""
        return (self.recent,) if self.stale == self.recent else (self.recent, self.stale)

    @property
    def compresses(self) -> bool:
        """True when Stale pages have a kind of their own."""
        return len(self.kinds) > 1

    def kind_at(self, position: int) -> PageKind:
        """The kind of page `position` when tiers depend on the position alone."""
        return self.recent if position < self.anchor_pages else self.stale

    def stale_end(self, tokens: int, page_size: int) -> int:
        """Pages before this position lie wholly outside the window of a request of `tokens`."""
        return max(0, tokens - self.window_tokens) // page_size


def build_profile(args: ServerArgs, geometry: KVGeometry, compute_dtype: torch.dtype) -> KvProfile:
    """The profile that `--kv-profile`, `--stale-format` and `--stale-fp8-layers` describe.

    Raises:
        ArgumentError: unknown format, or a layer that the model does not have.
    """
    layers = geometry.num_layers
    if args.kv_profile == "bf16":
        # The control stores what the model computed, exactly: 16 or 32 bits.
        recent = _uniform(parse_format(_RAW_FORMATS[compute_dtype]), layers)
    else:
        recent = _uniform(parse_format("fp8"), layers)
    stale = recent
    if args.kv_profile == "minima":
        try:
            stale_format = parse_format(args.stale_format)
        except ValueError as error:
            raise ArgumentError(f"--stale-format: {error}") from None
        stale = _uniform(stale_format, layers)
        kept = sorted({_layer(index, layers) for index in parse_layers(args.stale_fp8_layers)})
        if kept:
            name = f"{stale_format.name}+fp8[{','.join(map(str, kept))}]"
            stale = stale.with_layers(parse_format("fp8"), kept, name)
    page = geometry.page_size
    return KvProfile(
        name=args.kv_profile,
        recent=recent,
        stale=stale,
        anchor_pages=-(-args.anchor_tokens // page),
        window_tokens=args.recent_window,
    )


def _uniform(format_: Format, num_layers: int) -> PageKind:
    return PageKind.uniform(format_.name, format_, num_layers)


def _layer(index: int, num_layers: int) -> int:
    if not -num_layers <= index < num_layers:
        raise ArgumentError(f"--stale-fp8-layers: the model has no layer {index}")
    return index % num_layers
