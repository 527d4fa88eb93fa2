"""Logits of each family against transformers, prefill and decode, alone and in a ragged batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models_support import CHECKPOINTS, DenseAttention, run_batch, save_reference

from sglang_minima.models import load_model

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_reference(name, tmp_path)
    model, config = load_model(tmp_path, torch.float32)
    generator = torch.Generator().manual_seed(7)
    sequences = [
        torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()
        for length in (110, 1, 37)
    ]
    with torch.no_grad():
        expected = [reference(torch.tensor([ids])).logits[0] for ids in sequences]

    whole = run_batch(model, DenseAttention(), dict(enumerate(sequences)))
    for got, want in zip(whole, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)

    # A chunk, then token by token, another request's prefill in the same batches.
    backend = DenseAttention()
    run_batch(model, backend, {0: sequences[0][:100]})
    for step in range(100, 110):
        rows = {2: sequences[2]} if step == 104 else {}
        got = run_batch(model, backend, {0: [sequences[0][step]], **rows})
        torch.testing.assert_close(got[0][0], expected[0][step], atol=TOLERANCE, rtol=TOLERANCE)
        if rows:
            torch.testing.assert_close(got[1], expected[2], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama-tied-mha", "qwen2", "qwen3"])
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    save_reference(name, tmp_path)
    exact, _ = load_model(tmp_path, torch.float32)
    rounded, _ = load_model(tmp_path, torch.bfloat16)
    assert rounded.rotary.inverse.dtype == torch.float32
    ids = list(range(3, 60))
    [want] = run_batch(exact, DenseAttention(), {0: ids})
    [got] = run_batch(rounded, DenseAttention(), {0: ids})
    assert got.dtype == torch.float32
    relative = (got - want).norm() / want.norm()
    assert 1e-5 < relative < 0.05


def test_backend_gets_contiguous_rotated_heads(tmp_path: Path) -> None:
    save_reference("qwen3", tmp_path)
    model, config = load_model(tmp_path, torch.float32)
    calls = []

    class Recorder(DenseAttention):
        def attend(self, layer, q, k, v):  # type: ignore[no-untyped-def]
            calls.append((layer, q.shape, k.shape, v.shape))
            assert q.is_contiguous() and k.is_contiguous()
            return super().attend(layer, q, k, v)

    run_batch(model, Recorder(), {0: [1, 2, 3, 4, 5]})
    assert calls == [
        (layer, (5, config.num_heads, 16), (5, config.num_kv_heads, 16), (5, 2, 16))
        for layer in range(config.num_layers)
    ]
