"""The scheduler process: builds model, arena and cache, then serves messages until told to stop."""

from __future__ import annotations

import logging
import time
from array import array
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minima_kernels import KVGeometry
from minima_kernels.allocator import keep_freed_memory
from minima_kernels.cpu.library import current_level
from minima_kernels.cpu.route import fallback_reason
from minima_kernels.routes import ROUTES
from minima_radix import Namespace, check
from sglang_minima import __version__
from sglang_minima.cache.accounting import report
from sglang_minima.cache.arena import arena_bytes, check_memory
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.cache.profile import build_profile
from sglang_minima.cache.survey import Surveys, describe_match
from sglang_minima.channels import Addresses, Receiver, Sender
from sglang_minima.grammar.loader import GrammarLoader
from sglang_minima.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    FinishReason,
    GenerateRequest,
    TokenBatch,
    TokenOutput,
    ToScheduler,
    Wake,
)
from sglang_minima.models.config import ModelConfig
from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.runner.model_runner import ModelRunner, resolve_device, resolve_dtype
from sglang_minima.scheduler.garbage import avoid_full_collections, forget_old_objects
from sglang_minima.scheduler.scheduler import Scheduler
from sglang_minima.scheduler.statistics import usage
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_IDLE_WAIT = 0.5
"""Seconds an idle scheduler waits for a message before it looks around again."""

_CHECKED_PAGES = 10_000
"""Cached pages up to which an idle scheduler recounts them: some 15 us each, for which a request
that comes at that moment waits. The control method "check" recounts any number."""


class SchedulerProcess:
    """Wires the parts of one scheduler together and answers control messages."""

    def __init__(self, args: ServerArgs, addresses: Addresses) -> None:
        model_dir = resolve_model_path(args.model_path, args.download_model)
        began = time.perf_counter()
        check_settings(args, model_dir)
        self.runner = ModelRunner(args, str(model_dir))
        self._load_seconds = time.perf_counter() - began
        self.arena = self.runner.allocate(args)
        self.runner.attach(self.arena)
        if not args.disable_cuda_graph:
            self.runner.capture_graphs(args.max_running_requests)
        self.cache = PrefixCache(args, self.arena)
        self._surveys = Surveys(self.cache)
        tokenizer = Tokenizer.load(args.tokenizer_path or str(model_dir))
        self._receiver: Receiver[ToScheduler] = Receiver(addresses.scheduler, ToScheduler)
        self._detokenizer = Sender(addresses.detokenizer)
        self._frontend = Sender(addresses.frontend)
        self._args = args
        self._model_dir = str(model_dir)
        eos = tokenizer.eos_token_ids | frozenset(self.runner.config.eos_token_ids)
        self._grammars = GrammarLoader(tokenizer, eos, lambda: _wake(addresses.scheduler))
        self.scheduler = Scheduler(
            args, self.runner, self.cache, tokenizer, eos, self._send_outputs, self._grammars
        )
        self._start_seconds = time.perf_counter() - began

    def serve(self) -> None:
        """Runs for ever; the process is ended by its parent."""
        checked = progress = True
        avoid_full_collections()
        while True:
            if self.scheduler.busy:
                messages = self._receiver.drain()
            else:
                # Without progress the backlog waits for room: looking at once would only spin.
                converting = progress and self.cache.controller.due
                looking = converting or self._surveys.active
                message = self._receiver.receive(0 if looking else _IDLE_WAIT)
                messages = [] if message is None else [message, *self._receiver.drain()]
                if not (messages or looking or checked):
                    # Only after a quiet moment: the next turn of a chat must not wait for it.
                    forget_old_objects()
                    tree = self.cache.tree
                    if tree is None or tree.total_pages <= _CHECKED_PAGES:
                        self._check_when_idle()
                    checked = True
            for message in messages:
                self._handle(message)
            if self.scheduler.busy:
                checked = False
            began = time.perf_counter()
            progress = self.scheduler.step()
            if self._surveys.active:
                for reply_to, survey in self._surveys.advance(time.perf_counter() - began):
                    self._frontend.send(ControlReply(reply_to, True, survey))

    def _handle(self, message: ToScheduler) -> None:
        if isinstance(message, GenerateRequest):
            try:
                self.scheduler.add(message)
            except ValueError as error:
                self._reject(message, str(error))
        elif isinstance(message, AbortRequest):
            self.scheduler.abort(message.rid)
        elif isinstance(message, ControlRequest):
            reply = self._control(message)
            if reply is not None:
                self._frontend.send(reply)

    def _reject(self, message: GenerateRequest, reason: str) -> None:
        finish = FinishReason("abort", message=reason, status_code=400)
        self._send_outputs([TokenOutput(message.rid, [], finish, len(message.input_ids), 0, 0)])

    def _control(self, message: ControlRequest) -> ControlReply | None:
        """The answer to a control message; None when it comes later."""
        if message.method == "ping":
            return ControlReply(message.id, True, time.time())
        if message.method == "info":
            return ControlReply(message.id, True, self.info())
        if message.method == "load":
            return ControlReply(message.id, True, self.load())
        if message.method == "flush_cache":
            if self.scheduler.serving:
                return ControlReply(message.id, False, "requests are running or waiting")
            return ControlReply(message.id, True, self.cache.flush())
        if message.method == "check":
            problem = self._find_problem()
            return ControlReply(message.id, problem is None, problem)
        if message.method in ("survey", "probe"):
            try:
                return self._inspect(message)
            except ValueError as error:
                return ControlReply(message.id, False, str(error))
        return ControlReply(message.id, False, f"unknown control method {message.method!r}")

    def _inspect(self, message: ControlRequest) -> ControlReply | None:
        if message.method == "survey":
            self._surveys.ask(message.id)
            return None
        arguments = message.arguments
        namespace = Namespace(arguments["salt"], None, self.cache.profile.name)
        found = describe_match(self.cache, namespace, array("i", arguments["input_ids"]))
        return ControlReply(message.id, True, found)

    def _find_problem(self) -> str | None:
        try:
            check(self.cache.lifecycle)
        except Exception as error:
            return str(error)
        return None

    def _check_when_idle(self) -> None:
        problem = self._find_problem()
        if problem is not None:
            # Serving goes on: a wrong count is a bug to report, not a reason to drop users.
            logger.error("page accounting is wrong: %s", problem)

    def _send_outputs(self, outputs: list[TokenOutput]) -> None:
        self._detokenizer.send(TokenBatch(outputs))

    def static_info(self) -> dict[str, Any]:
        """What does not change after the start."""
        config, geometry = self.runner.config, self.arena.geometry
        return {
            "version": __version__,
            "model_path": self._args.model_path or self._model_dir,
            "tokenizer_path": self._args.tokenizer_path or self._model_dir,
            "model_dir": self._model_dir,
            "model_type": config.model_type,
            "architectures": [config.architecture],
            "vocab_size": config.vocab_size,
            "context_length": self.runner.context_length,
            "max_total_num_tokens": self.cache.capacity_tokens,
            "max_stale_tokens": self.cache.stale_capacity_tokens,
            "page_size": geometry.page_size,
            "device": str(self.runner.device),
            "dtype": str(self.runner.dtype).removeprefix("torch."),
            "quantization": self.runner.quantization,
            "kernels": self._kernels(),
            "cuda_graphs": self.runner.decode_memory is not None,
            "scratch_bytes": self.runner.scratch_bytes,
            "start_seconds": self._start_seconds,
            "load_seconds": self._load_seconds,
            "kv_profile": self.arena.profile.name,
            "kv_kinds": [kind.name for kind in self.arena.profile.kinds],
        }

    def _kernels(self) -> str:
        """Which implementation reads the pages, and why it is not the fastest one."""
        if self.runner.device.type == "cuda":
            lacking = self.runner.kernels_reason(self.arena)
            return "cuda" if lacking is None else f"torch ({lacking})"
        formats = {format_ for kind in self.arena.profile.kinds for format_ in kind.formats}
        reason = fallback_reason(formats, self.arena.geometry, self.runner.device)
        return f"native {current_level()}" if reason is None else f"torch ({reason})"

    def load(self) -> dict[str, int]:
        """How busy the scheduler is; routers ask often, so it costs no walk over the cache."""
        scheduler = self.scheduler
        return {
            "num_running_reqs": scheduler.running,
            "num_queue_reqs": scheduler.waiting,
            "num_used_tokens": scheduler.running_tokens,
        }

    def info(self) -> dict[str, Any]:
        """Static facts, load, cache accounting, counters and routes."""
        scheduler = self.scheduler
        return {
            **self.static_info(),
            **self.load(),
            "num_compiling_reqs": scheduler.compiling,
            "token_usage": usage(self.cache),
            "cache": report(self.cache),
            "statistics": scheduler.statistics.snapshot(),
            "grammars": self._grammars.snapshot(),
            "routes": [
                {"operation": operation, "route": route, "reason": reason, "count": count}
                for (operation, route, reason), count in ROUTES.snapshot().items()
            ],
        }


def check_settings(args: ServerArgs, model_dir: Path) -> None:
    """Finds out about settings that do not go with the model before its weights are read.

    Raises:
        ArgumentError: with one sentence about one of them.
    """
    config, device = ModelConfig.load(model_dir), resolve_device(args)
    geometry = KVGeometry(config.num_layers, config.num_kv_heads, config.head_dim, args.page_size)
    profile = build_profile(args, geometry, resolve_dtype(args, device, config.checkpoint_dtype))
    if args.kv_cache_memory is not None or args.max_total_tokens is not None:
        check_memory(args, arena_bytes(args, geometry, profile, device), device)


def _wake(address: str) -> None:
    """Ends the wait of an idle scheduler; called from another thread, which may not share its
    sockets."""
    sender = Sender(address)
    sender.send(Wake())
    sender.close(linger=1000)


def run_scheduler(args: ServerArgs, addresses: Addresses, ready: Connection) -> None:
    """Entry point of the scheduler process; sends {"ok": True, "info": ...} through `ready` once it
    can serve.

    Raises:
        ArgumentError, ModelLoadError and others: it cannot be built.
    """
    keep_freed_memory()
    process = SchedulerProcess(args, addresses)
    ready.send({"ok": True, "info": process.static_info()})
    ready.close()
    process.serve()
