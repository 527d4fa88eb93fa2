"""Flags of SGLang that have no setting here, and what becomes of a command line that has them.

Start scripts are copied from one server to another. A flag whose meaning holds here anyway is
accepted and said to be so; one that maps to a setting sets it; the others are refused with the
reason, which helps more than "unknown flag".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ForeignFlag:
    """One flag of SGLang, under all its spellings."""

    flags: tuple[str, ...]
    says: str
    """Why it is accepted, or why it is refused."""
    values: tuple[str, ...] | None = None
    """Values that are accepted (None: any, (): a switch without a value)."""
    refused: bool = False
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Value (of a switch: "") -> settings that it stands for."""

    @property
    def is_switch(self) -> bool:
        return self.values == ()


def _switch(says: str, *flags: str, sets: Mapping[str, Any] | None = None) -> ForeignFlag:
    return ForeignFlag(flags, says, (), sets={} if sets is None else {"": sets})


def _value(says: str, *flags: str, only: tuple[str, ...] | None = None) -> ForeignFlag:
    return ForeignFlag(flags, says, only)


def _refused(says: str, *flags: str) -> ForeignFlag:
    return ForeignFlag(flags, says, refused=True)


_ONE_DEVICE = "a server runs on one GPU or CPU; start several and put a router in front"
_MEMORY = "pages stay on one device: old ones are compressed (--kv-profile) or evicted"
_CHOSEN = "kernels are chosen by the machine"
_CUMULATIVE = "events of /generate hold all of the text so far"
_TIMES = "times of requests are in /metrics and in the lines of --log-requests"
_TLS = "put a reverse proxy in front for TLS"
_GRAPHS = "decode steps are captured up to --max-running-requests (256 at most)"

FOREIGN_FLAGS = (
    ForeignFlag(
        ("--kv-cache-dtype",),
        "the same as --kv-profile",
        ("auto", "fp8_e4m3", "bf16", "bfloat16"),
        sets={
            "fp8_e4m3": {"kv_profile": "fp8"},
            "bf16": {"kv_profile": "bf16"},
            "bfloat16": {"kv_profile": "bf16"},
        },
    ),
    _switch(
        "the same as --deterministic-cache",
        "--enable-deterministic-inference",
        sets={"deterministic_cache": True},
    ),
    _switch("metrics are always served at /metrics", "--enable-metrics"),
    _switch("cached tokens are always reported", "--enable-cache-report"),
    _switch("code from a model's directory is never run", "--trust-remote-code"),
    _switch("prefill and decode always share steps", "--enable-mixed-chunk"),
    _switch(_GRAPHS, "--disable-cuda-graph-padding"),
    _switch("nothing is compiled at the start", "--enable-torch-compile"),
    _switch("one device needs no reduction", "--disable-custom-all-reduce", "--enable-p2p-check"),
    _value(_GRAPHS, "--cuda-graph-max-bs"),
    _value(_CHOSEN, "--attention-backend", "--prefill-attention-backend"),
    _value(_CHOSEN, "--decode-attention-backend", "--sampling-backend"),
    _value("--chunked-prefill-size is the limit of a step", "--max-prefill-tokens"),
    _value("memory is reserved by need, not by forecast", "--schedule-conservativeness"),
    _value("every token is streamed at once", "--stream-interval"),
    _value("the server ends at once when a process dies", "--watchdog-timeout"),
    _value("nothing is written when a process dies", "--crash-dump-folder"),
    _value("every step is scheduled on its own", "--num-continuous-decode-steps"),
    _switch("an idle scheduler sleeps until a message comes", "--sleep-on-idle"),
    _switch("priority of a request is always honoured", "--enable-priority-scheduling"),
    _switch(_TIMES, "--show-time-cost", "--enable-request-time-stats-logging"),
    _value("a word and a JSON object stand in each line", "--log-requests-format"),
    _switch("logits that are no numbers always end a request", "--enable-nan-detection"),
    _switch("metrics are always served at /metrics", "--enable-metrics-for-all-schedulers"),
    _switch("metrics are always served at /metrics", "--collect-tokens-histogram"),
    _value("defaults of sampling are OpenAI's", "--sampling-defaults", only=("openai",)),
    _value("models are this project's own", "--model-impl", only=("auto", "sglang")),
    _value("one request warms the server up; --skip-server-warmup", "--warmups"),
    _value("--log-level is the level of all lines", "--log-level-http"),
    _value("grammars go through xgrammar", "--grammar-backend", only=("xgrammar",)),
    _value("tokenizers are fast ones", "--tokenizer-mode", only=("auto",)),
    _value(_ONE_DEVICE, "--tp-size", "--tensor-parallel-size", "--tp", only=("1",)),
    _value(_ONE_DEVICE, "--dp-size", "--data-parallel-size", "--dp", only=("1",)),
    _value(_ONE_DEVICE, "--pp-size", "--pipeline-parallel-size", only=("1",)),
    _value(_ONE_DEVICE, "--ep-size", "--expert-parallel-size", "--ep", only=("1",)),
    _value(_ONE_DEVICE, "--nnodes", only=("1",)),
    _value(_ONE_DEVICE, "--node-rank", only=("0",)),
    _value("choose a GPU with CUDA_VISIBLE_DEVICES", "--base-gpu-id", only=("0",)),
    _value("prefill and decode run in one server", "--disaggregation-mode", only=("null",)),
    _refused(_ONE_DEVICE, "--dist-init-addr", "--enable-dp-attention"),
    _refused(_MEMORY, "--enable-hierarchical-cache", "--enable-hicache", "--hicache-ratio"),
    _refused(_MEMORY, "--hicache-size", "--hicache-write-policy", "--hicache-storage-backend"),
    _refused(_MEMORY, "--cpu-offload-gb"),
    _refused("adapters are not served", "--enable-lora", "--lora-paths", "--max-loras-per-batch"),
    _refused("there is no speculative decoding", "--speculative-algorithm", "--speculative-algo"),
    _refused("there is no speculative decoding", "--speculative-draft-model-path"),
    _refused("there is no speculative decoding", "--speculative-num-steps"),
    _refused("there is no speculative decoding", "--speculative-num-draft-tokens"),
    _refused("models that embed are not served", "--is-embedding"),
    _refused("models that see images are not served", "--enable-multimodal"),
    _refused("prompts and replies are text here", "--skip-tokenizer-init"),
    _refused("a prompt that is too long gets a 400", "--allow-auto-truncate"),
    _refused("there is one key: --api-key", "--admin-api-key"),
    _refused("name a directory; nothing is downloaded by name", "--revision", "--download-dir"),
    _refused("page events are not published", "--kv-events-config"),
    _refused("weights are not replaced while serving", "--custom-weight-loader"),
    _refused(_CUMULATIVE, "--stream-output", "--incremental-streaming-output"),
    _refused("edit the model's config.json", "--json-model-override-args"),
    _refused("clients choose sampling parameters", "--preferred-sampling-params"),
    _refused("let the proxy that adds the prefix strip it", "--fastapi-root-path"),
    _refused(_TLS, "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-keyfile-password"),
    _refused(_TLS, "--enable-ssl-refresh"),
)
"""A flag that `ServerArgs` has is not looked up here."""

ELSEWHERE = {
    "block-size": "here: --page-size",
    "disable-log-requests": "requests are not logged unless --log-requests says so",
    "enable-auto-tool-choice": "not needed: tool calls are always read",
    "enable-chunked-prefill": "not needed: prompts are always computed in chunks",
    "enable-log-requests": "here: --log-requests",
    "enable-prefix-caching": "not needed: prefixes are always kept, see --disable-radix-cache",
    "no-enable-prefix-caching": "here: --disable-radix-cache",
    "enforce-eager": "here: --disable-cuda-graph",
    "gpu-memory-utilization": "here: --mem-fraction-static",
    "guided-decoding-backend": "not needed: grammars go through xgrammar",
    "kv-cache-memory-bytes": "here: --kv-cache-memory",
    "max-model-len": "here: --context-length",
    "max-num-batched-tokens": "here: --chunked-prefill-size",
    "max-num-seqs": "here: --max-running-requests",
    "num-gpu-blocks-override": "here: --max-total-tokens",
    "seed": "here: --random-seed",
    "tokenizer": "here: --tokenizer-path",
    "uvicorn-log-level": "here: --log-level",
}
"""Flags of vLLM -> what to do here."""
