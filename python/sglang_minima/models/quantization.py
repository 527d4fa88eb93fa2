"""Weights in fewer bits on the CPU: linear layers over the packed kernels that come with torch.

fp16 is float16 weights in float32 arithmetic (fbgemm); int8 and int4 are weight-only, with bfloat16
activations, and above a number of rows they unpack the weights and multiply in float32. Which one
is worth it, and the row limits, were measured on AVX2: `benchmark/weights.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_minima.models.causal_lm import CausalLM
from sglang_minima.models.errors import UnsupportedModel
from sglang_minima.models.gguf_blocks import GROUP
from sglang_minima.models.layers import Linear
from sglang_minima.models.weight_blocks import Blocks, group_blocks

Quantization = Literal["none", "fp16", "int8", "int4"]

INT8_ROWS = 16
"""Up to here the packed int8 kernel is faster than unpacking for a float32 product."""
INT4_ROWS = 32
"""The same for int4, which costs more to unpack."""
_ZERO_CODE = 8
_OUTPUT_MULTIPLE = 32


class Support(NamedTuple):
    """Whether this machine runs a choice, and why not."""

    ok: bool
    reason: str


def supported(choice: Quantization, device: torch.device, dtype: torch.dtype) -> Support:
    """Whether weights of `choice` run on `device` with activations of `dtype`."""
    if choice == "none":
        return Support(True, "")
    if device.type != "cpu":
        return Support(False, f"{choice} weights are for the CPU only")
    if dtype == torch.float16:
        return Support(False, f"{choice} weights need compute dtype float32 or bfloat16")
    if choice == "fp16" and "fbgemm" not in torch.backends.quantized.supported_engines:
        return Support(False, "fp16 weights need an x86 CPU with AVX2 (torch's fbgemm)")
    return Support(True, "")


def fastest(device: torch.device, dtype: torch.dtype) -> Quantization:
    """The fastest choice that keeps the model's answers.

    fp16 where the compute dtype is float32: half the bytes, float32 arithmetic. Nothing where it
    is bfloat16 or on a GPU: the weights are 16-bit there already.
    """
    if dtype == torch.float32 and supported("fp16", device, dtype).ok:
        return "fp16"
    return "none"


def quantize_model(model: CausalLM, choice: Quantization, blocks: dict[str, Blocks]) -> None:
    """Replaces every linear layer of a loaded model; the float weights go as it proceeds.

    Embedding and output head are int8 under "int4" too: they decide the answers most.

    Args:
        model: filled, on the CPU.
        choice: what becomes of the weights.
        blocks: 4-bit blocks of the checkpoint under the names of its tensors; they are taken as
            they are by "int4", other tensors are rounded to the nearest of 16 levels per group.

    Raises:
        UnsupportedModel: a matrix whose shape the kernel does not take.
    """
    if choice == "none":
        return
    for name, module in list(model.named_modules()):
        if not isinstance(module, Linear):
            continue
        if name == "model.embed_tokens" and model.lm_head is not None:
            continue  # only rows are looked up: no product gains from it
        lookup = name in ("model.embed_tokens", "lm_head")
        made: QuantizedLinear
        if choice == "fp16":
            made = Float16Linear(module, keep_rows=name == "model.embed_tokens")
        elif choice == "int8" or lookup:
            made = Int8Linear(module)
        else:
            made = Int4Linear(module, name, _blocks_of(name, blocks))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)


def _blocks_of(name: str, blocks: dict[str, Blocks]) -> Blocks | None:
    """The blocks of a module; those of a fused one are stacked if the file has all its parts."""
    parent, _, projection = name.rpartition(".")
    parts = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }.get(projection, (projection,))
    found = [blocks.get(f"{parent}.{part}.weight") for part in parts]
    present = [block for block in found if block is not None]
    if len(present) < len(found):
        return None
    codes, scales, minima = (torch.cat(tensors) for tensors in zip(*present, strict=True))
    return Blocks(codes, scales, minima)


class QuantizedLinear(nn.Module, ABC):
    """y = x Wᵀ + b of a `Linear`, with W in fewer bits."""

    bias: Tensor | None

    def __init__(self, source: Linear) -> None:
        super().__init__()
        bias = None if source.bias is None else source.bias.detach()
        self.register_buffer("bias", bias, persistent=False)

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
        super().__init__(source)
        weight = source.weight.detach().float()
        bias = None if self.bias is None else self.bias.float()
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


class Int8Linear(QuantizedLinear):
    """Weights int8 with one float scale per output, activations bfloat16."""

    codes: Tensor
    scales: Tensor
    ones: Tensor

    def __init__(self, source: Linear) -> None:
        super().__init__(source)
        weight = source.weight.detach().float()
        scales = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("codes", (weight / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("ones", torch.ones_like(scales, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] <= INT8_ROWS:
            # The kernel takes bfloat16 scales; the product is scaled here, to keep float32 ones.
            out = torch._weight_int8pack_mm(x.bfloat16(), self.codes, self.ones).float()
        else:
            out = F.linear(x.float(), self.codes.float())
        out = out * self.scales
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return (self.codes[index] * self.scales[index].unsqueeze(-1)).to(dtype)

    def dequantized(self) -> Tensor:
        return self.codes * self.scales[:, None]


class Int4Linear(QuantizedLinear):
    """16 levels per group of 32 weights, activations bfloat16.

    w = (code - 8) scale + zero, with zero = minimum + 8 scale: exactly the Q4_0 and Q4_1 blocks of
    GGUF; the packed kernel alone rounds scale and zero to bfloat16.
    """

    packed: Tensor
    scales_zeros: Tensor

    def __init__(self, source: Linear, name: str, blocks: Blocks | None) -> None:
        super().__init__(source)
        outputs, inputs = source.weight.shape
        if inputs % GROUP or outputs % _OUTPUT_MULTIPLE:
            raise UnsupportedModel(
                f"int4 weights need multiples of {GROUP} inputs and {_OUTPUT_MULTIPLE} outputs; "
                f"{name} has {inputs} and {outputs}."
            )
        self.blocks = group_blocks(source.weight.detach()) if blocks is None else blocks
        codes, scales, minima = self.blocks
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).reshape(outputs, inputs)
        self.packed = torch._convert_weight_to_int4pack_for_cpu(nibbles.to(torch.int32), 1)
        scale = scales.float()
        zero = minima.float() + _ZERO_CODE * scale
        pairs = torch.stack((scale, zero), dim=-1).transpose(0, 1)
        self.scales_zeros = pairs.contiguous().bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] <= INT4_ROWS:
            out = torch._weight_int4pack_mm_for_cpu(
                x.bfloat16(), self.packed, GROUP, self.scales_zeros
            )
            out = out if self.bias is None else out + self.bias
        else:
            bias = None if self.bias is None else self.bias.float()
            out = F.linear(x.float(), self.dequantized(), bias)
        return out.to(x.dtype)

    def dequantized(self) -> Tensor:
        return self.blocks.values()
