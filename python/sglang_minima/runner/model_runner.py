"""Owns the model and runs batches through it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from minima_kernels import KVGeometry, Rotation
from minima_kernels.cuda import library
from minima_kernels.cuda.build import compile_all, expansions, variants
from minima_kernels.cuda.compiler import cache_folder
from minima_kernels.cuda.route import append_reason, decode_reason, group_reason
from minima_kernels.cuda.variants import Variant, append_variant
from minima_kernels.upload import upload
from sglang_minima.cache.arena import KVArena
from sglang_minima.cache.profile import build_profile
from sglang_minima.models.config import ModelConfig
from sglang_minima.models.layer_ops import layer_ops
from sglang_minima.models.loader import load_model
from sglang_minima.models.progress import log_progress
from sglang_minima.models.quantization import Quantization, fastest, supported
from sglang_minima.runner.attention import CudaPagedAttention, PagedAttention
from sglang_minima.runner.batch import DecodeMemory, ForwardBatch
from sglang_minima.runner.graphs import DecodeGraphs, StepTensors
from sglang_minima.server_args import ServerArgs
from sglang_minima.settings import ArgumentError

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
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


@dataclass(frozen=True)
class ForwardOutput:
    """What a batch gave; good until the next one runs."""

    hidden: torch.Tensor
    """[rows, hidden]"""
    _logits: torch.Tensor | None
    """float32 [rows, vocab] where the step made them."""
    _logits_of: Callable[[torch.Tensor], torch.Tensor]

    @property
    def replayed(self) -> bool:
        """Whether a CUDA graph made it."""
        return self._logits is not None

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        """float32 [len(rows), vocab] of some rows, in ascending order."""
        is_all = len(rows) == len(self.hidden)
        if self._logits is not None:
            return self._logits if is_all else self._logits[list(rows)]
        if is_all:
            return self._logits_of(self.hidden)
        index = upload(rows, torch.int64, self.hidden.device)
        return self._logits_of(self.hidden.index_select(0, index))


class ModelRunner:
    """Loads the model; `forward` runs one batch against the arena."""

    def __init__(self, args: ServerArgs, model_dir: str) -> None:
        self.device = resolve_device(args)
        config = ModelConfig.load(Path(model_dir))
        self.dtype = resolve_dtype(args, self.device, config.checkpoint_dtype)
        self.context_length = args.context_length or config.max_position
        if self.context_length > config.max_position:
            raise ArgumentError(
                f"--context-length {args.context_length}: the model's own limit is "
                f"{config.max_position} tokens"
            )
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
        self._use_library()
        self._attention: PagedAttention | CudaPagedAttention | None = None
        self._arena: KVArena | None = None
        self._graphs: DecodeGraphs | None = None

    def _use_library(self) -> None:
        """Gives work between the products to FlashInfer where it serves, and says what it does."""
        if self.device.type != "cuda":
            return
        config = self.config
        sizes = config.num_heads, config.num_kv_heads, config.head_dim
        self.model.use(layer_ops(self.device, self.dtype))
        logger.info("%s", library.describe(self.device, self.dtype, *sizes))

    def geometry(self, page_size: int) -> KVGeometry:
        """KV geometry of this model."""
        config: ModelConfig = self.config
        return KVGeometry(config.num_layers, config.num_kv_heads, config.head_dim, page_size)

    def allocate(self, args: ServerArgs) -> KVArena:
        """An arena for this model's KV as the settings want it; not attached."""
        geometry = self.geometry(args.page_size)
        profile = build_profile(args, geometry, self.dtype)
        return KVArena.allocate(args, geometry, profile, self.device)

    def attach(self, arena: KVArena) -> None:
        """Sets the arena that holds this model's KV; the graphs of another one are dropped."""
        if arena is self._arena:
            return
        self._arena = arena
        self._graphs = None
        dim = arena.geometry.head_dim
        lacking = self.kernels_reason(arena)
        if lacking is None:
            # All now: what fails then is a server that does not start, and no request waits for it.
            formats = {format_.name for kind in arena.profile.kinds for format_ in kind.formats}
            needed = variants(formats, [dim], dtypes=[])
            for format_ in set(arena.profile.recent.formats):
                needed.append(append_variant(format_, arena.geometry, self.dtype))
            needed += expansions(formats, [dim], [self.dtype])
            self._compile(needed)
            rotation = Rotation(dim, torch.float32, self.device)
            self._attention = CudaPagedAttention(arena, rotation)
        else:
            if self.device.type == "cuda":
                logger.warning("New rows go through torch, and no step is replayed: %s", lacking)
            rotation = Rotation(dim, self.dtype, self.device)
            self._attention = PagedAttention(arena, rotation, lacking)

    @staticmethod
    def _compile(needed: Sequence[Variant]) -> None:
        count, jobs = sum(not variant.is_compiled for variant in needed), os.cpu_count() or 1
        if count:
            logger.info(
                "Compiling %d CUDA kernels, %d at once, some seconds each; they are kept in %s. "
                "Ahead of a start: python -m minima_kernels.cuda.build",
                count,
                jobs,
                cache_folder(),
            )
        compile_all(needed, jobs)

    def detach(self) -> None:
        """Lets go of the arena and of all that was made for it."""
        self._arena = self._attention = self._graphs = None

    def kernels_reason(self, arena: KVArena) -> str | None:
        """Why new rows go through torch and decode steps are not replayed as graphs; None where
        CUDA kernels do all of it."""
        if self.device.type != "cuda":
            return "no CUDA device"
        formats = {format_ for kind in arena.profile.kinds for format_ in kind.formats}
        geometry, recent = arena.geometry, arena.profile.recent
        return (
            decode_reason(formats, geometry, self.device)
            or group_reason(self.config.num_heads // self.config.num_kv_heads)
            or append_reason(recent.formats[0], geometry, self.dtype)
        )

    def capture_graphs(self, most_rows: int) -> None:
        """Captures decode steps of up to so many sequences, where the kernels allow it."""
        arena = self._arena
        assert arena is not None, "capture before attach"
        if self.kernels_reason(arena) is not None:
            return
        graphs = DecodeGraphs(
            self._step, arena, most_rows, self.config.num_heads, self.context_length
        )
        graphs.capture()
        self._graphs = graphs

    @property
    def decode_memory(self) -> DecodeMemory | None:
        """Where `build_batch` puts decode steps so that they can be replayed."""
        return None if self._graphs is None else self._graphs.memory

    @property
    def scratch_bytes(self) -> int:
        """Device memory that decode steps keep besides weights and arena."""
        return 0 if self._graphs is None else self._graphs.scratch_bytes

    @torch.inference_mode()
    def load(self, batch: ForwardBatch) -> None:
        """Makes the work lists of the kernels that `forward` will run, and sends them off."""
        if not isinstance(self._attention, CudaPagedAttention):
            return
        if batch.extend_plan is not None:
            batch.extend_plan.cuda(self.config.num_heads)
        if batch.decode_plan is not None:
            batch.decode_plan.cuda(self.config.num_heads)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Runs the batch: writes KV of every row."""
        if self._graphs is not None:
            replayed = self._graphs.replay(batch)
            if replayed is not None:
                hidden, logits = (tensor[: batch.num_rows] for tensor in replayed)
                return ForwardOutput(hidden, logits, self.logits)
        return ForwardOutput(self._hidden(batch)[: batch.num_rows], None, self.logits)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] for hidden states [n, hidden]."""
        return self.model.logits(hidden)

    def _hidden(self, batch: ForwardBatch) -> torch.Tensor:
        assert self._attention is not None, "forward before attach"
        self._attention.bind(batch)
        hidden: torch.Tensor = self.model(batch.input_ids, batch.positions, self._attention)
        return hidden

    def _step(self, batch: ForwardBatch) -> StepTensors:
        hidden = self._hidden(batch)
        return StepTensors(hidden, self.model.logits(hidden))
