"""Routes that tell about the server: health, model, settings, load and metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from sglang_minima import __version__
from sglang_minima.entrypoints.errors import HttpError, json_response, openai_error
from sglang_minima.entrypoints.metrics import ServerMetrics
from sglang_minima.entrypoints.replies import WEIGHT_VERSION
from sglang_minima.entrypoints.sse import answering_errors
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.inputs import PromptInput
from sglang_minima.tokenization.manager import QueueFull, TokenizerManager
from sglang_minima.tokenization.prompts import ModelLimits
from sglang_minima.tokenization.state import EngineDead

EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"
_HEALTH_SECONDS = 20.0


@dataclass
class ServerStatus:
    """What the information routes report beside the scheduler's own numbers."""

    args: ServerArgs
    """As the user gave them."""
    model_dir: str
    """What `args.model_path` was resolved to."""
    model_info: dict[str, Any]
    """What the scheduler reported when it was ready."""
    started: float
    tool_call_parser: str | None = None
    """The format of tool calls, given or found in the chat template."""
    ready: bool = False
    """False until the first request of the server to itself has been answered."""

    @classmethod
    def begin(cls, args: ServerArgs, model_dir: str, model_info: dict[str, Any]) -> ServerStatus:
        """The status of a server that starts now."""
        return cls(args, model_dir, model_info, time.time())

    @property
    def model_path(self) -> str:
        """What the user calls the model; frontends choose a chat template by it."""
        return self.args.model_path or EMBEDDED_MODEL_NAME

    @property
    def model_name(self) -> str:
        """The name in `/v1/models`."""
        return self.args.served_model_name or self.model_path

    @property
    def max_model_len(self) -> int:
        """Tokens that one sequence may have."""
        return ModelLimits.from_info(self.model_info).longest_sequence

    @property
    def tokenizer_path(self) -> str:
        return self.args.tokenizer_path or self.model_dir


def model_info(status: ServerStatus) -> dict[str, Any]:
    """The answer of `/model_info`."""
    return {
        "model_path": status.model_path,
        "served_model_name": status.model_name,
        "tokenizer_path": status.tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": WEIGHT_VERSION,
        "load_format": status.args.load_format,
        "reasoning_parser": status.args.reasoning_parser,
        "tool_call_parser": status.tool_call_parser,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": status.model_info["model_type"],
        "architectures": status.model_info["architectures"],
    }


def server_info(status: ServerStatus, scheduler: dict[str, Any]) -> dict[str, Any]:
    """The answer of `/server_info`: settings, the model's facts, the scheduler's numbers."""
    return {
        **status.args.to_dict(),
        **status.model_info,
        **scheduler,
        "model_path": status.model_path,
        "served_model_name": status.model_name,
        "tokenizer_path": status.tokenizer_path,
        "max_model_len": status.max_model_len,
        "tp_size": 1,
        "dp_size": 1,
        "startup_time": status.started,
        "internal_states": [scheduler],
        "version": __version__,
        "frontend": "python",
    }


async def probe(manager: TokenizerManager) -> None:
    """Generates one token; a full server must only show that its scheduler answers.

    Raises:
        EngineDead: the server lost a process.
    """
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    rid = f"HEALTH_CHECK_{uuid.uuid4().hex}"
    try:
        generation = await manager.submit([PromptInput(prompt=[0], sampling=sampling, rid=rid)])
    except QueueFull:
        await manager.control("ping")
        return
    try:
        await generation.wait()
    finally:
        generation.abort()


def add_info_routes(
    app: FastAPI, manager: TokenizerManager, status: ServerStatus, metrics: ServerMetrics
) -> None:
    """Adds the information routes, in both spellings where there are two.

    `/check_cache` has the scheduler check every invariant of its pages between two steps, in time
    proportional to the pages in use: 200 {"ok": true}, or 500 with the first violation found.
    """

    def healthy() -> bool:
        return status.ready and manager.dead is None

    async def scheduler_info() -> dict[str, Any]:
        reply = await manager.control("info")
        return dict(reply.value)

    async def health(request: Request) -> Response:
        return Response(status_code=200 if healthy() else 503)

    async def health_generate(request: Request) -> Response:
        if not healthy():
            return Response(status_code=503)
        try:
            await asyncio.wait_for(probe(manager), _HEALTH_SECONDS)
        except (TimeoutError, EngineDead):
            return Response(status_code=503)
        return Response(status_code=200)

    async def get_model_info(request: Request) -> Response:
        return json_response(model_info(status))

    @answering_errors(openai_error)
    async def get_server_info(request: Request) -> Response:
        return json_response(server_info(status, await scheduler_info()))

    @answering_errors(openai_error)
    async def get_metrics(request: Request) -> Response:
        text = metrics.render(await scheduler_info())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    @answering_errors(openai_error)
    async def get_load(request: Request) -> Response:
        return json_response([await _load(manager)])

    @answering_errors(openai_error)
    async def loads(request: Request) -> Response:
        entry = await _load(manager)
        return json_response(
            {
                "timestamp": time.time(),
                "version": __version__,
                "dp_rank_count": 1,
                "loads": [entry],
                "aggregate": {key: value for key, value in entry.items() if key != "dp_rank"},
            }
        )

    @answering_errors(openai_error)
    async def check_cache(request: Request) -> Response:
        reply = await manager.control("check")
        if reply.ok:
            return json_response({"ok": True})
        return json_response({"ok": False, "violation": reply.value}, 500)

    @answering_errors(openai_error)
    async def profile(request: Request) -> Response:
        raise HttpError(501, "there is no profiler here; attach one to the process from outside")

    @answering_errors(openai_error)
    async def concatenate(request: Request) -> Response:
        raise HttpError(
            501,
            "requests cannot be concatenated on the server; set "
            "sglang.global_config.enable_parallel_encoding = False in the frontend",
        )

    for path in ("/health", "/ready", "/ping"):
        app.add_route(path, health, ["GET"])
    app.add_route("/health_generate", health_generate, ["GET"])
    for path in ("/model_info", "/get_model_info"):
        app.add_route(path, get_model_info, ["GET"])
    for path in ("/server_info", "/get_server_info"):
        app.add_route(path, get_server_info, ["GET"])
    app.add_route("/metrics", get_metrics, ["GET"])
    app.add_route("/check_cache", check_cache, ["GET"])
    app.add_route("/get_load", get_load, ["GET"])
    app.add_route("/v1/loads", loads, ["GET"])
    for path in ("/start_profile", "/stop_profile"):
        app.add_route(path, profile, ["GET", "POST"])
    app.add_route("/concate_and_append_request", concatenate, ["POST"])


async def _load(manager: TokenizerManager) -> dict[str, Any]:
    load = (await manager.control("load")).value
    return {
        "dp_rank": 0,
        "num_reqs": manager.num_running,
        "num_running_reqs": load["num_running_reqs"],
        "num_waiting_reqs": load["num_queue_reqs"],
        "num_tokens": load["num_used_tokens"],
        "max_total_num_tokens": manager.limits.max_total_tokens,
    }
