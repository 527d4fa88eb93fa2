"""Weights in fewer bits on the CPU.

fp16 is float16 weights in float32 arithmetic (torch's fbgemm). int8, int4 and gguf are blocks of 32
weights with a scale in the native kernels, which round blocks of activations to integers: 16 bits,
which changes nothing that is seen; under int4 8 bits, which is the fastest. What each costs and
changes was measured: `benchmark/weights.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minima_kernels.cpu.library import MISSING, native_library
from minima_kernels.cpu.linear import BLOCK, BlockKind, BlockMatrix
from sglang_minima.models.causal_lm import CausalLM
from sglang_minima.models.errors import UnsupportedModel
from sglang_minima.models.layers import Linear
from sglang_minima.models.weight_blocks import (
    Panels,
    has_blocks,
    load_panels,
    round_to_q4,
    round_to_q8,
)

Quantization = Literal["none", "fp16", "int8", "int4", "gguf"]

_LOOKUPS = ("model.embed_tokens", "lm_head")
"""Embedding and output head: 8-bit under int4 too, they decide the answers most."""


class Support(NamedTuple):
    """Whether this machine runs a choice, and why not."""

    ok: bool
    reason: str


def supported(
    choice: Quantization, device: torch.device, dtype: torch.dtype, model_dir: Path | None = None
) -> Support:
    """Whether weights of `choice` run on `device` with activations of `dtype`.

    Args:
        model_dir: the checkpoint; without one, that it has what `choice` needs is not asked.
    """
    if choice == "none":
        return Support(True, "")
    if device.type != "cpu":
        return Support(False, f"{choice} weights are for the CPU only")
    if dtype == torch.float16:
        return Support(False, f"{choice} weights need compute dtype float32 or bfloat16")
    if choice == "fp16":
        if not _has_fp16():
            return Support(False, "fp16 weights need an x86 CPU with AVX2 (torch's fbgemm)")
        return Support(True, "")
    if native_library() is None:
        return Support(False, f"{choice} weights need the native kernels: {MISSING}")
    if choice == "gguf" and model_dir is not None and not has_blocks(model_dir):
        return Support(False, "the model is no GGUF file with Q4_0, Q4_1 or Q8_0 weights")
    return Support(True, "")


def _has_fp16() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def fastest(device: torch.device, dtype: torch.dtype, model_dir: Path) -> Quantization:
    """The fastest choice that keeps the model's answers.

    Where the compute dtype is float32: the weights of a GGUF file as they are, which is the same
    model in a quarter of the bytes; else fp16. Nothing where it is bfloat16 or on a GPU: the
    weights are 16-bit there already.
    """
    if dtype == torch.float32:
        choices: tuple[Quantization, ...] = ("gguf", "fp16")
        for choice in choices:
            if supported(choice, device, dtype, model_dir).ok:
                return choice
    return "none"


def take_blocks(model: CausalLM, choice: Quantization, model_dir: Path) -> None:
    """Replaces the linear layers whose blocks are beside the checkpoint as `choice` wants them.

    Their weights need not be read then.
    """
    if choice not in ("gguf", "int8", "int4"):
        return
    for name, panels in load_panels(model_dir).items():
        wanted = {"gguf": panels.kind, "int8": BlockKind.Q8, "int4": BlockKind.Q4}[choice]
        if choice == "int4" and name in _LOOKUPS:
            wanted = BlockKind.Q8
        module = model.get_submodule(name)
        if panels.kind == wanted and isinstance(module, Linear):
            _replace(model, name, BlockLinear(module, panels, _activation_bits(choice, panels)))


def quantize_model(model: CausalLM, choice: Quantization) -> None:
    """Replaces every linear layer of a loaded model; the float weights go as it proceeds.

    Args:
        model: filled, on the CPU.
        choice: what becomes of the weights; of "gguf" it is those that have no blocks, which
            become float16 where that runs.

    Raises:
        UnsupportedModel: a matrix whose shape the kernel does not take.
    """
    if choice == "none" or (choice == "gguf" and not _has_fp16()):
        return
    for name, module in list(model.named_modules()):
        if not isinstance(module, Linear):
            continue
        if name == "model.embed_tokens" and model.lm_head is not None:
            continue  # only rows are looked up: no product gains from it
        if choice in ("fp16", "gguf"):
            _replace(model, name, Float16Linear(module, keep_rows=name == "model.embed_tokens"))
            continue
        if module.weight.shape[1] % BLOCK:
            raise UnsupportedModel(
                f"{choice} weights need multiples of {BLOCK} inputs; {name} has "
                f"{module.weight.shape[1]}."
            )
        rounded = round_to_q8 if choice == "int8" or name in _LOOKUPS else round_to_q4
        panels = rounded(module.weight.detach())
        _replace(model, name, BlockLinear(module, panels, _activation_bits(choice, panels)))


def _activation_bits(choice: Quantization, panels: Panels) -> Literal[8, 16]:
    return 8 if choice == "int4" and panels.kind == BlockKind.Q4 else 16


def _replace(model: CausalLM, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


class QuantizedLinear(nn.Module, ABC):
    """y = x Wᵀ + b of a `Linear`, with W in fewer bits."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x [M, inputs] -> [M, outputs], dtype of x."""

    @abstractmethod
    def dequantized(self) -> Tensor:
        """float32 [outputs, inputs]: the matrix that `forward` stands for."""


class Float16Linear(QuantizedLinear):
    """Weights rounded to float16 (11 bits of mantissa), products and sums in float32."""

    def __init__(self, source: Linear, keep_rows: bool = False) -> None:
        """keep_rows: keep a plain float16 copy too, for lookups of rows."""
        super().__init__()
        weight = source.weight.detach().float()
        bias = None if source.bias is None else source.bias.detach().float()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        rows = weight.half() if keep_rows else None
        self.register_buffer("half_rows", rows, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), self.packed)
        return out.to(x.dtype)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        assert isinstance(self.half_rows, Tensor)
        return F.embedding(index, self.half_rows).to(dtype)

    def dequantized(self) -> Tensor:
        weight, _ = torch.ops.quantized.linear_unpack_fp16(self.packed)
        values: Tensor = weight.float()
        return values


class BlockLinear(QuantizedLinear):
    """Weights in blocks of 32, products in integers: see `minima_kernels.cpu.linear`."""

    def __init__(
        self, source: Linear, panels: Panels, activation_bits: Literal[8, 16] = 16
    ) -> None:
        super().__init__()
        self.activation_bits: Literal[8, 16] = activation_bits
        self.bias = source.bias  # a parameter still: the loader may fill it later
        self.shape = source.weight.shape
        self.panels = panels

    @cached_property
    def matrix(self) -> BlockMatrix:
        """Made at the first use, when the bias is there."""
        bias = None if self.bias is None else self.bias.detach().float()
        outputs, inputs = self.shape
        return BlockMatrix(
            self.panels.kind, outputs, inputs, self.panels.data, bias, self.activation_bits
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.multiply(x.float()).to(x.dtype)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return self.matrix.rows(index).to(dtype)

    def dequantized(self) -> Tensor:
        return self.matrix.rows(torch.arange(self.matrix.outputs))
