"""GGUF files written by the gguf package, converted, against the models they were made from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_support import write_gguf
from models_support import DenseAttention, make_reference, run_batch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from minima_kernels.cpu.library import native_library
from sglang_minima.models import ModelLoadError, UnsupportedModel, load_model
from sglang_minima.models.gguf import convert_gguf
from sglang_minima.models.gguf_file import read_gguf
from sglang_minima.models.layers import Linear
from sglang_minima.models.quantization import BlockLinear
from sglang_minima.models.weight_blocks import has_blocks

TOKENS: dict[str, Any] = {
    "model": "gpt2",
    "pre": "default",
    "tokens": ["<|end|>", *(chr(ord("!") + i) for i in range(93)), "Ġ", "ab"],
    "token_type": [3] + [1] * 95,
    "merges": ["a b"],
    "eos_token_id": 0,
}
CASES = [
    ("llama-wide-heads", Kind.F32),
    ("llama-tied-mha", Kind.F16),
    ("llama-biases", Kind.BF16),
    ("qwen2", Kind.F32),
    ("qwen2-tied-yarn", Kind.F16),
    ("qwen3", Kind.F32),
]
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_converted_model_equals_its_source(name: str, kind: Kind, tmp_path: Path) -> None:
    reference = make_reference(name)
    metadata = YARN if name.endswith("yarn") else None
    stored = write_gguf(tmp_path / "m.gguf", reference, TOKENS, kind=kind, metadata=metadata)
    out = tmp_path / "hf"
    out.mkdir()
    convert_gguf(tmp_path / "m.gguf", out)

    written = load_file(out / "model.safetensors")
    assert written.keys() == stored.keys()
    for key, values in stored.items():
        assert torch.equal(written[key].float(), torch.from_numpy(values)), key

    reference.load_state_dict({k: torch.from_numpy(v) for k, v in stored.items()}, strict=False)
    model, config = load_model(out, torch.float32)
    assert config.eos_token_ids == {0}
    ids = list(range(90, 5, -1))
    [got] = run_batch(model, DenseAttention(), {0: ids})
    with torch.no_grad():
        want = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)

    # The directory is a checkpoint for transformers too.
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(again(torch.tensor([ids])).logits[0], want)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q5_0])
def test_quantised_tensors_keep_their_exact_values(kind: Kind, tmp_path: Path) -> None:
    config = make_reference("llama").config
    config.update({"hidden_size": 64, "intermediate_size": 96, "head_dim": 16})
    config.update({"num_attention_heads": 4})
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config)
    stored = write_gguf(tmp_path / "m.gguf", reference, TOKENS, kind=kind)
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for key, values in stored.items():
        assert written[key].dtype == torch.float32
        assert torch.equal(written[key], torch.from_numpy(values)), key

    # Blocks are kept too, with rows in the order of the checkpoint, of fused modules together.
    assert has_blocks(tmp_path) == (kind != Kind.Q5_0)
    if not has_blocks(tmp_path) or native_library() is None:
        return
    exact, _ = load_model(tmp_path, torch.float32)
    model, _ = load_model(tmp_path, torch.float32, quantization="gguf")
    matrices = [name for name, module in exact.named_modules() if isinstance(module, Linear)]
    for name in matrices:
        module = model.get_submodule(name)
        assert isinstance(module, BlockLinear)
        weight = exact.get_submodule(name).weight
        torch.testing.assert_close(module.dequantized(), weight, rtol=1e-6, atol=1e-7)


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """The table that llama.cpp writes for Llama 3.1: published constants, wavelengths in tokens."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def test_llama3_rope_table(tmp_path: Path) -> None:
    reference = make_reference("llama-3")
    table = llama3_divisors(8, 500000.0, 32.0)
    write_gguf(tmp_path / "m.gguf", reference, TOKENS, tensors={"rope_freqs.weight": table})
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert rope == {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    write_gguf(tmp_path / "n.gguf", reference, TOKENS, tensors={"rope_freqs.weight": table**2})
    with pytest.raises(UnsupportedModel, match="other than those of Llama 3"):
        convert_gguf(tmp_path / "n.gguf", tmp_path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"expert_count": 8}, "Mixture-of-experts"),
        ({"attention.sliding_window": 64}, "sliding-window"),
        ({"rope.dimension_count": 4}, "partial rotary"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "longrope"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "linear"),
        ({**YARN, "rope.scaling.attn_factor": 2.0}, "attention factor"),
    ],
)
def test_unsupported_metadata(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_reference("llama"), TOKENS, metadata=metadata)
    with pytest.raises(UnsupportedModel, match=words):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_unknown_tensor(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    write_gguf(tmp_path / "m.gguf", make_reference("llama"), TOKENS, tensors=extra)
    with pytest.raises(UnsupportedModel, match="attn_sinks"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_other_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"mamba .* llama, qwen2, qwen3"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_reference("qwen2"), TOKENS, kind=Kind.F16, metadata=YARN)
    mine, theirs = read_gguf(path), gguf.GGUFReader(path)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(mine.metadata) == keys
    for key in keys:
        assert mine.metadata[key] == theirs.fields[key].contents(), key
    assert len(mine.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        ours = mine.tensors[tensor.name]
        assert ours.kind == tensor.tensor_type
        assert np.array_equal(ours.data, tensor.data.reshape(-1).view(np.uint8))


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_reference("llama"), TOKENS)
    data = path.read_bytes()
    for cut in (0, 3, 20, 40, 300, 2000, len(data) - 100):
        path.write_bytes(data[:cut])
        words = "not a readable GGUF file: " + ("it is truncated" if cut >= 20 else "")
        with pytest.raises(ModelLoadError, match=words):
            read_gguf(path)
    path.write_bytes(b"GGML" + data[4:])
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        read_gguf(path)
    path.write_bytes(data[:4] + (9).to_bytes(4, "little") + data[8:])
    with pytest.raises(UnsupportedModel, match="version 9"):
        read_gguf(path)
    # A length of 2^63 must not be allocated or looped over.
    path.write_bytes(data[:24] + (1 << 63).to_bytes(8, "little") + data[32:])
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        read_gguf(path)
