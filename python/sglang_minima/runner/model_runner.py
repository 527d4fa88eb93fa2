"""Owns the model and runs batches through it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from minima_kernels import KVGeometry, Rotation
from sglang_minima.cache.arena import KVArena
from sglang_minima.models.config import ModelConfig
from sglang_minima.models.loader import load_model
from sglang_minima.models.progress import log_progress
from sglang_minima.models.quantization import Quantization, fastest, supported
from sglang_minima.runner.attention import PagedAttention
from sglang_minima.runner.batch import ForwardBatch
from sglang_minima.server_args import ArgumentError, ServerArgs

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_CPU_FLAGS = ("avx512_bf16", "amx_bf16")


def resolve_device(args: ServerArgs) -> torch.device:
    """The device of `--device`.

    Raises:
        ArgumentError: cuda was asked for and there is none.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: torch sees no CUDA device")
    if args.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(args: ServerArgs, device: torch.device, checkpoint: str) -> torch.dtype:
    """The compute dtype of `--dtype`.

    auto: on a GPU the checkpoint's own 16-bit dtype (float16 for float32 checkpoints, which keeps
    more of their bits); on a CPU bfloat16 where it is fast, else float32.
    """
    if args.dtype != "auto":
        return _DTYPES[args.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if checkpoint == "bfloat16" else torch.float16
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return torch.float32
    return torch.bfloat16 if any(flag in flags for flag in _BF16_CPU_FLAGS) else torch.float32


def resolve_quantization(
    args: ServerArgs, device: torch.device, dtype: torch.dtype, model_dir: Path
) -> Quantization:
    """The weights of `--quantization`.

    Raises:
        ArgumentError: this device, compute dtype or model does not run them.
    """
    if args.quantization == "auto":
        return fastest(device, dtype, model_dir)
    support = supported(args.quantization, device, dtype, model_dir)
    if not support.ok:
        raise ArgumentError(f"--quantization {args.quantization}: {support.reason}")
    return args.quantization


class ModelRunner:
    """Loads the model; `forward` runs one batch against the arena."""

    def __init__(self, args: ServerArgs, model_dir: str) -> None:
        self.device = resolve_device(args)
        checkpoint = ModelConfig.load(Path(model_dir)).checkpoint_dtype
        self.dtype = resolve_dtype(args, self.device, checkpoint)
        if self.device.type == "cpu" and args.cpu_threads:
            torch.set_num_threads(args.cpu_threads)
        self.quantization = resolve_quantization(args, self.device, self.dtype, Path(model_dir))
        self.model, self.config = load_model(
            Path(model_dir),
            self.dtype,
            self.device,
            load_format=args.load_format,
            quantization=self.quantization,
            progress=log_progress(logger, "Loading weights"),
        )
        self.model.eval()
        self.context_length = min(
            args.context_length or self.config.max_position, self.config.max_position
        )
        self._attention: PagedAttention | None = None

    def geometry(self, page_size: int) -> KVGeometry:
        """KV geometry of this model."""
        config: ModelConfig = self.config
        return KVGeometry(config.num_layers, config.num_kv_heads, config.head_dim, page_size)

    def attach(self, arena: KVArena) -> None:
        """Sets the arena that holds this model's KV."""
        rotation = Rotation(arena.geometry.head_dim, self.dtype, self.device)
        self._attention = PagedAttention(arena, rotation)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Runs the batch: writes KV of every row, returns hidden states [rows, hidden]."""
        assert self._attention is not None, "forward before attach"
        self._attention.bind(batch)
        hidden: torch.Tensor = self.model(batch.input_ids, batch.positions, self._attention)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] for hidden states [n, hidden]."""
        return self.model.logits(hidden)
