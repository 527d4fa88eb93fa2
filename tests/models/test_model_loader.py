"""`load_model`: shards, casts, dummy weights, and clear errors for what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models_support import DenseAttention, run_batch, save_reference
from safetensors.torch import load_file, save_file

from sglang_minima.models import ModelLoadError, load_model
from sglang_minima.models.loader import DUMMY_STD

WEIGHTS = "model.safetensors"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_reference("llama", tmp_path)
    return tmp_path


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path / WEIGHTS)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / WEIGHTS)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    save_reference("qwen2", tmp_path / "whole")
    save_reference("qwen2", tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    whole, _ = load_model(tmp_path / "whole", torch.float32)
    shards, _ = load_model(tmp_path / "shards", torch.float32)
    for (name, a), (_, b) in zip(whole.named_parameters(), shards.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_missing_shard(tmp_path: Path) -> None:
    save_reference("qwen2", tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(json.dumps({"weight_map": {"a": 5}}))
    with pytest.raises(ModelLoadError, match="a shard whose name is no text"):
        load_model(tmp_path, torch.float32)
    index.write_text(text)
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(ModelLoadError, match="lacks the shard"):
        load_model(tmp_path, torch.float32)


def test_fused_weights_are_the_checkpoint_rows(checkpoint: Path) -> None:
    model, _ = load_model(checkpoint, torch.float32)
    tensors = load_file(checkpoint / WEIGHTS)
    parts = [tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(model.model.layers[1].self_attn.qkv_proj.weight, torch.cat(parts))
    parts = [tensors[f"model.layers.2.mlp.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(model.model.layers[2].mlp.gate_up_proj.weight, torch.cat(parts))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_missing_tensors(checkpoint: Path) -> None:
    rewrite(checkpoint, **{K_PROJ: None})
    with pytest.raises(ModelLoadError, match=f"lacks {K_PROJ}"):
        load_model(checkpoint, torch.float32)


def test_unexpected_tensors(checkpoint: Path) -> None:
    rewrite(checkpoint, **{f"model.extra.{i}": torch.zeros(1) for i in range(6)})
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM.*extra\.0.*and 2 more"):
        load_model(checkpoint, torch.float32)


def test_wrong_shape(checkpoint: Path) -> None:
    rewrite(checkpoint, **{K_PROJ: torch.zeros(4, 4)})
    with pytest.raises(ModelLoadError, match=r"\[4, 4\].*\[16, 48\]"):
        load_model(checkpoint, torch.float32)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("-inf"), torch.float32), (1e6, torch.float16)],
)
def test_weights_that_are_no_numbers(checkpoint: Path, value: float, dtype: torch.dtype) -> None:
    weight = load_file(checkpoint / WEIGHTS)[K_PROJ]
    weight[3, 7] = value
    rewrite(checkpoint, **{K_PROJ: weight})
    with pytest.raises(ModelLoadError, match=rf"Tensor {K_PROJ} of .* in {str(dtype)[6:]}"):
        load_model(checkpoint, dtype)


def test_truncated_file(checkpoint: Path) -> None:
    data = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(checkpoint, torch.float32)


def test_no_weight_files(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()
    with pytest.raises(ModelLoadError, match=r"no model\*\.safetensors"):
        load_model(checkpoint, torch.float32)


def test_leftovers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    save_reference("llama-tied-mha", tmp_path)
    before, _ = load_model(tmp_path, torch.float32)
    rewrite(
        tmp_path,
        **{
            "lm_head.weight": torch.zeros(96, 48),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        },
    )
    after, _ = load_model(tmp_path, torch.float32)
    [want] = run_batch(before, DenseAttention(), {0: [1, 2, 3]})
    [got] = run_batch(after, DenseAttention(), {0: [1, 2, 3]})
    assert torch.equal(got, want)


def test_progress_ends_at_the_total(checkpoint: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(checkpoint, torch.float32, progress=lambda *call: calls.append(call))
    total = (checkpoint / WEIGHTS).stat().st_size
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_dummy_weights_need_only_the_config(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()
    config = json.loads((checkpoint / "config.json").read_text())
    config["attention_bias"] = True
    (checkpoint / "config.json").write_text(json.dumps(config))
    model, _ = load_model(checkpoint, torch.float32, load_format="dummy")
    again, _ = load_model(checkpoint, torch.float32, load_format="dummy")
    layer = model.model.layers[0]
    assert torch.equal(layer.input_layernorm.weight, torch.ones(48))
    assert torch.equal(layer.self_attn.qkv_proj.bias, torch.zeros(80))
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(DUMMY_STD, rel=0.1)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    [logits] = run_batch(model, DenseAttention(), {0: [1, 2, 3]})
    assert logits.isfinite().all() and logits.std() > 0
