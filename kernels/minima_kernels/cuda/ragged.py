"""Causal attention of new tokens to each other by FlashInfer's ragged prefill kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from minima_kernels.attention.merge import State
from minima_kernels.cuda.library import package

HEAD_DIMS = (64, 128, 256)
"""Those it has kernels for; ``benchmark/flashinfer_parts.py`` compares them with torch's."""

_WORKSPACE_BYTES = 1 << 20  # partials of split keys would need more; nothing is split here


def backend(capability: tuple[int, int], head_dim: int) -> str:
    """FlashAttention-3 on Hopper, FlashAttention-2 elsewhere and at head dim 256.

    There the library's (0.7.4) FlashAttention-3 has a race: one warp says for all of a thread block
    that outputs have left shared memory, and values of the next tile are copied over what the
    others still read. Up to head dim 128 warps wait for each other before. Seen as rows of NaN
    under compute-sanitizer.
    """
    return "fa3" if capability[0] == 9 and head_dim <= 128 else "fa2"


class RaggedPrefill:
    """A planned kernel for one head dim; see ``backend``.

    Keys are not split among thread blocks: a row's bits do not depend on the batch around it.
    (FlashAttention-2 chooses tiles of rows by their average number, in which sums may differ.)
    """

    def __init__(self, device: torch.device, head_dim: int) -> None:
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = package().prefill.BatchPrefillWithRaggedKVCacheWrapper(
            workspace,
            "NHD",
            backend=backend(torch.cuda.get_device_capability(device), head_dim),
        )
        self._planned: tuple[object, ...] = ()
        self._copied = torch.cuda.Event()

    def attend(
        self,
        step: object,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_indptr: Sequence[int],
        scale: float,
    ) -> State:
        """Causal attention of each request's new tokens to themselves.

        Args:
            step: what the rows of all layers belong to; the first layer plans for them.
            q: ``[N, Hq, D]`` float16 or bfloat16; heads and channels contiguous.
            k, v: ``[N, H, D]`` likewise.
            q_indptr: where the rows of each request begin, and where all end.
            scale: factor on the scores.

        Returns:
            out ``[N, Hq, D]``, lse float32 ``[N, Hq]``, natural.
        """
        # The step itself, not its id: another one could get that.
        key = (step, q.dtype, q.shape[1:], k.shape[1], scale)
        if not self._planned or self._planned[0] is not step or self._planned[1:] != key[1:]:
            self._plan(q, k, q_indptr, scale)
            self._planned = key
        out, lse = self._wrapper.run(q, k, v, return_lse=True, lse_base="ln", enable_pdl=False)
        return State(out, lse)

    def _plan(
        self, q: torch.Tensor, k: torch.Tensor, q_indptr: Sequence[int], scale: float
    ) -> None:
        # The plan before this one may still be on its way out of the buffer that both use.
        self._copied.synchronize()
        rows = torch.tensor(list(dict.fromkeys(q_indptr)), dtype=torch.int32).pin_memory()
        self._wrapper.plan(
            rows,
            rows,
            q.shape[1],
            k.shape[1],
            q.shape[2],
            causal=True,
            sm_scale=scale,
            q_data_type=q.dtype,
            disable_split_kv=True,
        )
        self._copied.record()


@cache
def ragged_prefill(device: torch.device, head_dim: int) -> RaggedPrefill:
    """The one of a device: its buffers are used again by every step."""
    return RaggedPrefill(device, head_dim)
