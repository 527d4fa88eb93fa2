"""The attention layer of the engine: stores new KV in Recent pages, attends over mixed pages.

Keys (after RoPE), values and queries are rotated once by an orthogonal matrix; pages of every
format hold rotated vectors, so scores are unchanged and only the output is rotated back.
"""

from __future__ import annotations

import torch

from minima_kernels import Rotation, append_tokens
from minima_kernels.attention import run_decode, run_extend
from minima_kernels.cpu.route import reason_now
from minima_kernels.cpu.stack import DecodeStep
from minima_kernels.cuda.append import CudaAppend
from sglang_minima.cache.arena import KVArena
from sglang_minima.models.backend import RopeBackend, StepBackend
from sglang_minima.runner.batch import ForwardBatch


class PagedAttention(StepBackend):
    """The `AttentionBackend` that the models call, bound to one batch at a time.

    Args:
        lacking: on a GPU, why it is not `CudaPagedAttention` that serves.
    """

    def __init__(self, arena: KVArena, rotation: Rotation, lacking: str = "") -> None:
        self._lacking = lacking
        self._arena = arena
        self._rotation = rotation
        self._scale = arena.geometry.head_dim**-0.5
        self._batch: ForwardBatch | None = None

    def bind(self, batch: ForwardBatch) -> None:
        """Sets the batch that the following `attend` calls belong to."""
        self._batch = batch

    def decode_step(self) -> DecodeStep | None:
        """`StepBackend.decode_step`: for batches of nothing but decodes over native pages."""
        batch = self._batch
        assert batch is not None, "attend before bind"
        plan = batch.decode_plan
        if plan is None or batch.extend_plan is not None or not self._rotation.is_native:
            return None
        if reason_now(plan.fallback_reason) is not None:
            return None
        return DecodeStep(
            plan.native,
            self._arena.profile.recent,
            self._arena.buffer,
            batch.page_bytes,
            batch.slots,
            self._rotation.block,
            self._scale,
        )

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores k and v, attends with q.

        Args:
            layer: index of the model layer.
            q: [rows, query heads, head_dim], after RoPE.
            k: [rows, kv heads, head_dim], after RoPE.
            v: [rows, kv heads, head_dim].

        Returns:
            [rows, query heads, head_dim], the dtype of q.
        """
        batch = self._batch
        assert batch is not None, "attend before bind"
        arena, geometry = self._arena.buffer, self._arena.geometry
        q, k, v = (self._rotation.forward(x) for x in (q, k, v))
        recent = self._arena.profile.recent
        pages, slots, lacking = batch.page_bytes, batch.slots, self._lacking
        append_tokens(recent, layer, arena, pages, slots, k, v, geometry, lacking=lacking)
        split = batch.extend_rows
        outputs = []
        if batch.extend_plan is not None:
            outputs.append(
                run_extend(
                    batch.extend_plan, q[:split], k[:split], v[:split], arena, layer, self._scale
                ).out
            )
        if batch.decode_plan is not None:
            outputs.append(run_decode(batch.decode_plan, q[split:], arena, layer, self._scale).out)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self._rotation.inverse(out)


class CudaPagedAttention(RopeBackend):
    """The same on a GPU: RoPE, rotation and storage in one kernel, the rotation of queries and
    outputs within those of the decode."""

    def __init__(self, arena: KVArena, rotation: Rotation) -> None:
        buffer, geometry = arena.buffer, arena.geometry
        self._arena = arena
        self._rotation = rotation
        self._append = CudaAppend(arena.profile.recent, geometry, rotation, buffer.device)
        self._scale = geometry.head_dim**-0.5
        self._batch: ForwardBatch | None = None

    def bind(self, batch: ForwardBatch) -> None:
        """Sets the batch that the following `attend_unturned` calls belong to."""
        self._batch = batch

    def attend_unturned(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """`RopeBackend.attend_unturned`: stores k and v, attends with q."""
        batch = self._batch
        assert batch is not None, "attend before bind"
        arena, scale, rotation = self._arena.buffer, self._scale, self._rotation
        split = batch.extend_rows
        q, new_k = self._append.run(
            layer, q, k, v, cos, sin, arena, batch.page_bytes, batch.slots, split
        )
        outputs = []
        if batch.extend_plan is not None:
            plan = batch.extend_plan
            outputs.append(
                run_extend(
                    plan, q[:split], new_k, v[:split], arena, layer, scale, rotation=rotation
                ).out
            )
        if batch.decode_plan is not None:
            plan_rows = q[split:]
            outputs.append(
                run_decode(batch.decode_plan, plan_rows, arena, layer, scale, rotation=rotation).out
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
