"""Layers run with sums and norms in one, as a GPU library has them, give what they give apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models_support import CHECKPOINTS, DenseAttention, run_batch, save_reference
from torch import Tensor

from minima_kernels.routes import ROUTES, Route
from sglang_minima.models.layer_ops import TORCH_OPS, TorchOps, layer_ops
from sglang_minima.models.loader import load_model


class FusedOps(TorchOps):
    """Keeps the contract of the library: x and residual are overwritten."""

    fuses_residuals = True

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.copy_(super().add_rms_norm(x, residual, weight, eps))


@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "qwen3"])
def test_fused_layers(name: str, tmp_path: Path) -> None:
    assert name in CHECKPOINTS
    save_reference(name, tmp_path)
    model, _ = load_model(tmp_path, torch.float32, "cpu")
    prompts = {0: [3, 5, 8], 1: [7]}
    more = {1: [9, 2], 0: [4]}
    backend = DenseAttention()
    expected = [run_batch(model, backend, batch) for batch in (prompts, more)]
    model.use(FusedOps("tried"))
    before = ROUTES.snapshot()
    backend = DenseAttention()
    found = [run_batch(model, backend, batch) for batch in (prompts, more)]
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
    route = Route("norm", "torch", "tried")
    counted = ROUTES.snapshot()[route] - before.get(route, 0)
    assert counted == 2 * model.config.num_layers


def test_a_cpu_has_the_operations_of_torch() -> None:
    assert layer_ops(torch.device("cpu"), torch.bfloat16) is TORCH_OPS
