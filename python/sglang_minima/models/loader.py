"""Loads a directory in Hugging Face format into a `CausalLM`, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_minima.models.causal_lm import CausalLM
from sglang_minima.models.config import ModelConfig, read_json_object
from sglang_minima.models.errors import ModelLoadError
from sglang_minima.models.fused import fuse_layers
from sglang_minima.models.progress import Progress
from sglang_minima.models.quantization import Quantization, quantize_model, take_blocks
from sglang_minima.models.registry import build_model

DUMMY_STD = 0.02
_INDEX = "model.safetensors.index.json"
_LISTED = 4


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    quantization: Quantization = "none",
    progress: Progress | None = None,
) -> tuple[CausalLM, ModelConfig]:
    """Builds the model of `config.json` and fills it.

    Files are memory-mapped and copied one tensor at a time, so the peak is the model itself plus
    one tensor.

    Args:
        path: directory with config.json and model*.safetensors (one file, or shards and index).
        dtype: of weights and activations; the checkpoint is cast.
        device: where the weights go.
        load_format: "dummy" ignores the weight files and draws seeded random weights of the
            config's geometry (standard deviation 0.02), for measurements of speed.
        quantization: of the weights once they are loaded.
        progress: told of (bytes done, bytes in all).

    Raises:
        ModelLoadError: files or tensors are missing, unexpected, unreadable or of a wrong shape.
        UnsupportedModel: the config is of a kind this server does not serve.
    """
    config = ModelConfig.load(path)
    device = torch.device(device)
    with torch.device("meta"):
        model = build_model(config)
    model = model.to(dtype).to_empty(device=device).eval()
    model.rotary.materialise(device)
    with torch.no_grad():
        if load_format == "dummy":
            _fill_randomly(model)
        else:
            named = set(checkpoint_tensors(model))
            take_blocks(model, quantization, path)
            _fill_from_files(model, path, named, progress)
        quantize_model(model, quantization)
        fuse_layers(model)
    return model, config


def checkpoint_tensors(model: CausalLM) -> dict[str, Tensor]:
    """Checkpoint name -> the (part of a) parameter it goes to; fused parameters appear as rows."""
    config = model.config
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj": (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)),
        "gate_up_proj": (
            ("gate_proj", config.intermediate_size),
            ("up_proj", config.intermediate_size),
        ),
    }
    targets: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        parent, _, projection = module.rpartition(".")
        if projection in fused:
            parts = fused[projection]
            rows = torch.split(parameter, [size for _, size in parts])
            for (part, _), view in zip(parts, rows, strict=True):
                targets[f"{parent}.{part}.{kind}"] = view
        else:
            targets[name] = parameter
    return targets


def _fill_from_files(
    model: CausalLM, path: Path, named: set[str], progress: Progress | None
) -> None:
    """Fills the parameters; `named` are the tensors of the checkpoint, also those not needed."""
    files = _weight_files(path)
    total = sum(file.stat().st_size for file in files)
    done = 0
    targets = checkpoint_tensors(model)
    unexpected: list[str] = []
    for name, read in _tensors(files):
        target = targets.pop(name, None)
        if target is None:
            if name not in named and not _ignorable(name, model.config):
                unexpected.append(name)
            continue
        tensor = read()
        if target.shape != tensor.shape:
            raise ModelLoadError(
                f"Tensor {name} has shape {list(tensor.shape)}, config.json asks for "
                f"{list(target.shape)}."
            )
        target.copy_(tensor)
        low, high = target.aminmax()
        if not (low.isfinite() and high.isfinite()):
            raise ModelLoadError(
                f"Tensor {name} of {path} has values that are infinite or no numbers in "
                f"{str(target.dtype).removeprefix('torch.')}."
            )
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    if targets:
        raise ModelLoadError(f"The checkpoint in {path} lacks {_some(list(targets))}.")
    if unexpected:
        raise ModelLoadError(
            f"The checkpoint in {path} has tensors that the {model.config.architecture} "
            f"architecture does not: {_some(unexpected)}."
        )
    if progress is not None:
        progress(total, total)


def _fill_randomly(model: CausalLM) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
    generator = torch.Generator(device=model.rotary.inverse.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" not in name and name.endswith("weight"):
            parameter.normal_(std=DUMMY_STD, generator=generator)


def _weight_files(path: Path) -> list[Path]:
    if (path / _INDEX).exists():
        weight_map = read_json_object(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelLoadError(f"{path / _INDEX} has no weight_map.")
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelLoadError(f"{path / _INDEX} has a shard whose name is no text.")
        files = [path / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.exists():
                raise ModelLoadError(f"{path} lacks the shard {file.name} that its index names.")
        return files
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise ModelLoadError(f"{path} has no model*.safetensors.")
    return files


def _tensors(files: list[Path]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Names, and what reads the tensor until the next one is asked for."""
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118 (the handle is not a mapping)
                    yield name, partial(handle.get_tensor, name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}.") from None


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors that old checkpoints carry although they follow from the rest."""
    if name == "lm_head.weight":
        return config.tie_embeddings
    return name.endswith("rotary_emb.inv_freq")


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_LISTED])
    more = len(names) - _LISTED
    return f"{shown} and {more} more" if more > 0 else shown
