"""A scheduler process without a model: it answers each prompt with its own tokens, in a cycle.

Sample i of a prompt begins at prompt token i. A rid steers it: "slow..." takes 50 ms a token,
"die..." ends the process, "refuse..." is refused with status 503. A prompt that holds ⟦a script⟧ is
answered with the script and an end-of-sequence token.
"""

from __future__ import annotations

import dataclasses
import os
import time
from array import array
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from minima_radix import LifecycleCounters
from sglang_minima.channels import Addresses, Receiver, Sender
from sglang_minima.durations import Durations
from sglang_minima.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    FinishReason,
    GenerateRequest,
    LogProbs,
    TokenBatch,
    TokenOutput,
    ToScheduler,
)
from sglang_minima.scheduler.stopping import StopMatcher
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.tokenizer import Tokenizer

CONTEXT_LENGTH = 512
MAX_TOTAL_TOKENS = 400
CACHED_TOKENS = 2


def large_survey() -> dict[str, Any]:
    """A tree of 50,000 nodes for the dashboard: 40 branches that fork, one of 20,000 leaves."""
    parents = [-1, *[0] * 40]
    parents += [1 + int(40 * (i / 29_959) ** 2) for i in range(29_959)]
    parents += [1] * 20_001
    depth = np.minimum(np.arange(len(parents)), 41)
    depth = np.where(depth == 0, 0, np.where(depth <= 40, 1, 2))
    pages = np.array([0, *[12] * 40, *[2] * (len(parents) - 41)])
    stale = np.where(np.arange(len(parents)) % 3 == 0, 0, pages // 2)
    columns = {
        "parent": parents,
        "depth": depth,
        "start": np.maximum(depth - 1, 0) * 12,
        "pages": pages,
        "anchor": np.minimum(pages, 1) * (depth == 1),
        "stale": stale,
        "hits": np.arange(len(parents)) % 90,
        "locks": np.arange(len(parents)) % 7 == 0,
    }
    return {
        "page_size": 16,
        "page_bytes": {"recent": 200, "stale": 90},
        "pages_in_tree": int(pages.sum()),
        "complete": True,
        "seconds": 0.2,
        "namespaces": [{"name": "default namespace", "lora": None}],
        "id": np.arange(len(parents), dtype="<i8").tobytes(),
        "idle": np.linspace(0, 3600, len(parents), dtype="<f4").tobytes(),
        **{name: np.asarray(values, dtype="<i4").tobytes() for name, values in columns.items()},
    }


def durations(*seconds: float) -> dict[str, Any]:
    times = Durations()
    for value in seconds:
        times.observe(value)
    return times.snapshot()


@dataclass
class Running:
    request: GenerateRequest
    output: list[int] = field(default_factory=list)
    due: float = 0.0
    announced: bool = False
    script: list[int] = field(default_factory=list)
    """What to answer; empty: the prompt, in a cycle."""
    tokens: array[int] = field(init=False)
    """Prompt and output."""
    stop: StopMatcher | None = None

    def __post_init__(self) -> None:
        self.tokens = array("i", self.request.input_ids)


def logprobs(ids: list[int], request: GenerateRequest, first_known: bool) -> LogProbs:
    """The log-probability of token t is -(t % 7 + 1) / 8; exact in float32 and JSON."""

    def value(token: int) -> float:
        return -(token % 7 + 1) / 8

    top: list[Any] | None = None
    chosen: list[Any] | None = None
    tokens: list[tuple[float | None, int]] = [(value(token), token) for token in ids]
    if request.top_logprobs_num:
        top = [
            [(value(token + step), token + step) for step in range(request.top_logprobs_num)]
            for token in ids
        ]
    if request.token_ids_logprob:
        chosen = [[(value(token), token) for token in request.token_ids_logprob] for _ in ids]
    if tokens and not first_known:
        tokens[0] = (None, ids[0])
        top, chosen = [None, *top[1:]] if top else top, [None, *chosen[1:]] if chosen else chosen
    return LogProbs(tokens, top, chosen)


class FakeScheduler:
    def __init__(self, args: ServerArgs, addresses: Addresses) -> None:
        self.tokenizer = Tokenizer.load(str(args.model_path))
        self.context_length = args.context_length or CONTEXT_LENGTH
        self.receiver: Receiver[ToScheduler] = Receiver(addresses.scheduler, ToScheduler)
        self.detokenizer = Sender(addresses.detokenizer)
        self.frontend = Sender(addresses.frontend)
        self.running: dict[str, Running] = {}
        self.aborted: list[str] = []
        self.requests: list[dict[str, Any]] = []

    def info(self) -> dict[str, Any]:
        return {
            "model_path": "fake",
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self.tokenizer.vocab_size,
            "context_length": self.context_length,
            "max_total_num_tokens": max(MAX_TOTAL_TOKENS, self.context_length - 112),
            "page_size": 16,
            "device": "cpu",
            "dtype": "float32",
            "quantization": "none",
            "kernels": "none",
            "cuda_graphs": False,
            "kv_kinds": ["fp8", "tq3"],
            "max_stale_tokens": 2 * MAX_TOTAL_TOKENS,
            "start_seconds": 2.5,
            "load_seconds": 1.5,
        }

    def load(self) -> dict[str, int]:
        return {
            "num_running_reqs": len(self.running),
            "num_queue_reqs": 0,
            "num_used_tokens": 17,
        }

    def live_info(self) -> dict[str, Any]:
        kind = {"pages_used": 3, "pages_free": 1, "bytes_used": 300, "bytes_free": 100}
        return {
            **self.info(),
            **self.load(),
            "token_usage": 0.25,
            "cache": {
                "arena_bytes": 400,
                "kinds": {"fp8": {**kind, "bytes_slab_waste": 0}},
                "pages_used": 3,
                "tiers": {
                    "recent": {"pages": 2, "bytes": 200},
                    "stale": {"pages": 1, "bytes": 100},
                },
                "free_slab_bytes": 0,
                "pages_in_tree": 3,
                "pages_evictable": 2,
                "pages_locked": 1,
                "tokens_available": 16,
                "compression_vs_bf16": 2.0,
                "retier_backlog": 0,
                "retier_seconds": 0.25,
                "counters": {
                    **dataclasses.asdict(LifecycleCounters(sealed_pages=5, evicted_pages=6)),
                    "retiered_pages": {"fp8->tq3": 4},
                },
                "copied_tokens": 8,
                "evictions": durations(0.004, 0.3, 20.0),
            },
            "statistics": {
                "preemptions": 0,
                "generated_tokens": 1,
                "computed_prompt_tokens": 3,
                "cached_tokens": 2,
                "cached_tokens_by_kind": {"fp8": 2},
                "last_cache_hit_rate": 0.5,
                "last_gen_throughput": 12.5,
                "kv_read_bytes": 1000,
                "kv_read_bytes_per_request": 3000,
                "gpu_decode_seconds": 12.5,
                "gpu_idle_seconds": 0.5,
                "passes": {"prefill_none": 2, "decode_cuda_graph": 5},
            },
            "grammars": {"followed": 4, "found": 3, "compilations": durations()},
            "num_compiling_reqs": 1,
            "routes": [{"operation": "decode", "route": "torch", "reason": "", "count": 9}],
            "aborted": self.aborted,
            "scheduler_pid": os.getpid(),
            "requests": self.requests[-8:],
        }

    def serve(self) -> None:
        while True:
            message = self.receiver.receive(0.002 if self.running else None)
            for item in [] if message is None else [message, *self.receiver.drain()]:
                self.handle(item)
            now = time.monotonic()
            due = [running for running in self.running.values() if running.due <= now]
            if due:
                self.detokenizer.send(TokenBatch([self.step(running, now) for running in due]))

    def handle(self, message: ToScheduler) -> None:
        if isinstance(message, GenerateRequest):
            if message.rid.startswith("die"):
                os._exit(7)
            self.requests.append({"rid": message.rid, "salt": message.salt})
            self.running[message.rid] = Running(message, script=self.script(message))
        elif isinstance(message, AbortRequest):
            running = self.running.pop(message.rid, None)
            if running is not None:
                self.aborted.append(message.rid)
                finish = FinishReason("abort", message="aborted by the client")
                self.detokenizer.send(TokenBatch([self.output(running, [], finish)]))
        else:
            self.frontend.send(self.control(message))

    def script(self, request: GenerateRequest) -> list[int]:
        text = self.tokenizer.decode(request.input_ids)
        if "⟧" not in text:
            return []
        script = text[text.rindex("⟦") + 1 : text.rindex("⟧")]
        return [*self.tokenizer.encode(script), *self.tokenizer.eos_token_ids]

    def control(self, message: ControlRequest) -> ControlReply:
        if message.method == "info":
            return ControlReply(message.id, True, self.live_info())
        if message.method == "load":
            return ControlReply(message.id, True, self.load())
        if message.method == "survey":
            return ControlReply(message.id, True, large_survey())
        if message.method == "check":
            return ControlReply(message.id, not self.running, "a page is held by a request")
        return ControlReply(message.id, not self.running)

    def step(self, running: Running, now: float) -> TokenOutput:
        request = running.request
        if request.rid.startswith("slow"):
            running.due = now + 0.05
        if request.rid.startswith("refuse"):
            del self.running[request.rid]
            finish = FinishReason("abort", message="no room", status_code=503)
            return self.output(running, [], finish)
        if request.sampling.max_new_tokens == 0:
            del self.running[request.rid]
            return self.output(running, [], FinishReason("length"))
        ids = running.script or request.input_ids
        token = ids[
            (len(running.output) + (0 if running.script else request.seed_offset)) % len(ids)
        ]
        running.output.append(token)
        running.tokens.append(token)
        if running.stop is None:
            eos = self.tokenizer.eos_token_ids
            running.stop = StopMatcher(request.sampling, eos, self.tokenizer)
        finish = running.stop.check(running.tokens, len(request.input_ids))
        if finish is not None:
            del self.running[request.rid]
        return self.output(running, [token], finish)

    def output(self, running: Running, ids: list[int], finish: FinishReason | None) -> TokenOutput:
        request, first = running.request, not running.announced
        running.announced = True
        given = made = None
        if request.return_logprob:
            made = logprobs(ids, request, True)
            if first and request.logprob_start_len >= 0:
                start = request.logprob_start_len
                given = logprobs(request.input_ids[start:], request, start > 0)
        sampling = request.sampling
        return TokenOutput(
            rid=request.rid,
            new_ids=ids,
            finish=finish,
            prompt_tokens=len(request.input_ids),
            completion_tokens=len(running.output),
            cached_tokens=CACHED_TOKENS,
            cached_by_tier={"fp8": CACHED_TOKENS},
            input_logprobs=given,
            output_logprobs=made,
            prompt_tail=request.input_ids[-6:] if first else None,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            stop=sampling.stop if first else [],
        )


def end_at_once(args: ServerArgs, addresses: Addresses, ready: Connection) -> None:
    """A scheduler that says nothing."""
    ready.close()


def run_fake_scheduler(args: ServerArgs, addresses: Addresses, ready: Connection) -> None:
    scheduler = FakeScheduler(args, addresses)
    if args.served_model_name == "broken":
        ready.send({"ok": False, "error": "the weights are missing"})
        return
    ready.send({"ok": True, "info": scheduler.info()})
    scheduler.serve()
