"""The engine over quantised weights, and settings that cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_kit import EngineKit, make_args

from sglang_minima.command_line import parse_args
from sglang_minima.models.quantization import fastest, supported
from sglang_minima.runner.model_runner import ModelRunner, resolve_quantization
from sglang_minima.settings import ArgumentError

CPU = torch.device("cpu")


@pytest.mark.parametrize("choice", ["none", "fp16", "int8", "int4"])
def test_engine_serves_each_choice(tiny_dir: Path, choice: str) -> None:
    support = supported(choice, CPU, torch.float32)  # type: ignore[arg-type]
    if not support.ok:
        pytest.skip(support.reason)
    args = make_args(quantization=choice, kv_profile="bf16", max_total_tokens=2048)
    kit = EngineKit(args, ModelRunner(args, str(tiny_dir)))
    prompts = [list(range(3, 3 + length)) for length in (5, 70, 200)]
    together = kit.generate(prompts, max_new_tokens=8, ignore_eos=True)
    assert [len(tokens) for tokens in together] == [8, 8, 8]
    kit.check_idle()


def test_auto_is_the_fastest(tiny_dir: Path) -> None:
    runner = ModelRunner(make_args(quantization="auto"), str(tiny_dir))
    assert runner.quantization == fastest(CPU, torch.float32, tiny_dir)


@pytest.mark.parametrize("choice", ["fp16", "int8", "int4"])
def test_gpu_has_no_quantised_weights(tiny_dir: Path, choice: str) -> None:
    with pytest.raises(ArgumentError, match=f"--quantization {choice}: .* for the CPU only"):
        resolve_quantization(
            make_args(quantization=choice), torch.device("cuda"), torch.bfloat16, tiny_dir
        )


def test_gguf_weights_need_a_gguf_model(tiny_dir: Path) -> None:
    with pytest.raises(ArgumentError, match="the model is no GGUF file"):
        resolve_quantization(make_args(quantization="gguf"), CPU, torch.float32, tiny_dir)


def test_the_flag() -> None:
    assert parse_args([]).quantization == "auto"
    assert parse_args(["--quantization", "int4"]).quantization == "int4"
