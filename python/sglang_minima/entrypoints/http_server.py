"""The HTTP server: the application, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from sglang_minima.dashboard.history import LatencyWindow
from sglang_minima.dashboard.routes import Dashboard
from sglang_minima.entrypoints.access_log import AccessLog
from sglang_minima.entrypoints.anthropic_api import add_anthropic_routes
from sglang_minima.entrypoints.auth import KeyAuth
from sglang_minima.entrypoints.chat_api import add_chat_route
from sglang_minima.entrypoints.conversation import ChatRenderer
from sglang_minima.entrypoints.errors import HttpError, error_body_of, json_response
from sglang_minima.entrypoints.http_metrics import CountRequests
from sglang_minima.entrypoints.info_api import ServerStatus, add_info_routes, probe
from sglang_minima.entrypoints.metrics import ServerMetrics
from sglang_minima.entrypoints.native_api import add_native_routes
from sglang_minima.entrypoints.openai_api import add_openai_routes
from sglang_minima.entrypoints.request_log import RequestLog
from sglang_minima.entrypoints.tokenize_api import add_tokenize_routes
from sglang_minima.models.progress import log_progress
from sglang_minima.processes import ProcessGroup
from sglang_minima.tokenization.manager import TokenizerManager
from sglang_minima.tokenization.prompts import ModelLimits
from sglang_minima.tokenization.state import RequestObserver
from sglang_minima.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DRAIN_SECONDS = 2.0
"""How long running requests may go on after the server was asked to end. Those that need longer are
told so: supervisors soon kill a process that lingers, and a dropped stream explains nothing."""
_DEAF_SECONDS = 1.0
"""How long clients may then take to read their answer before they are cut off."""
_KEEP_ALIVE_SECONDS = 60
"""Longer than the idle time after which usual clients drop pooled connections themselves."""
_BACKLOG = 2048


class _DrainingServer(uvicorn.Server):
    """Ends in bounded time, whatever clients do.

    Args:
        config: of the server.
        give_up: called when requests still run `drain_seconds` after the server began to end.
        running: how many requests run.
    """

    def __init__(
        self, config: uvicorn.Config, give_up: Callable[[], None], running: Callable[[], int]
    ) -> None:
        super().__init__(config)
        self.drain_seconds = _DRAIN_SECONDS
        self._give_up = give_up
        self._running = running
        self._signal: str | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        # A second Ctrl-C would tear everything down in the middle of the answers.
        self.force_exit = False
        self._signal = signal.Signals(sig).name

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        if self._signal is not None:
            wait = f", waiting up to {self.drain_seconds:g} s" if self._running() else ""
            count = self._running()
            noun = "request" if count == 1 else "requests"
            logger.info("%s: %d %s running%s.", self._signal, count, noun, wait)
        timers = (
            loop.call_later(self.drain_seconds, self._give_up),
            loop.call_later(self.drain_seconds + _DEAF_SECONDS, self._cut_connections),
        )
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()

    def _cut_connections(self) -> None:
        """Ends connections to clients that neither send the rest of a body nor read an answer."""
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


class HttpServer:
    """Serves one launched model until a signal, or the death of a process, ends it.

    Args:
        status: settings, and what the scheduler reported when it was ready.
        group: the running processes.
        tokenizer: of the model.
    """

    def __init__(
        self,
        status: ServerStatus,
        group: ProcessGroup,
        tokenizer: Tokenizer,
    ) -> None:
        args = self._args = status.args
        self._group = group
        self._tokenizer = tokenizer
        self._limits = ModelLimits.from_info(status.model_info)
        self._metrics = ServerMetrics(status.model_name)
        self._latency = LatencyWindow()
        self._status = status
        self._death: str | None = None
        config = uvicorn.Config(
            self._app(),
            loop="uvloop",
            log_config=None,
            access_log=args.log_level == "debug",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            backlog=_BACKLOG,
        )
        self._server = _DrainingServer(config, self._end_requests, self._num_running)
        self._manager: TokenizerManager | None = None
        for name in ("uvicorn", "uvicorn.error"):
            logging.getLogger(name).setLevel(
                logging.DEBUG if args.log_level == "debug" else logging.WARNING
            )

    def run(self, listener: socket.socket) -> str | None:
        """Serves on a bound socket; returns why a process died, or None after a clean end."""
        self._server.run(sockets=[listener])
        return self._death

    def _app(self) -> FastAPI:
        app = FastAPI(
            title="sglang_minima",
            lifespan=self._lifespan,
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
        )
        app.add_exception_handler(HTTPException, _http_exception)
        app.add_exception_handler(Exception, _unexpected)
        if self._args.api_key is not None:
            app.add_middleware(KeyAuth, api_key=self._args.api_key)
        # Added later, it comes earlier: a browser asks without the key whether it may ask, and
        # what the key refuses counts too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=["*"],
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
        app.add_middleware(AccessLog)
        app.add_middleware(CountRequests, metrics=self._metrics.http)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        manager = self._manager = TokenizerManager(
            self._args, self._limits, self._tokenizer, self._group.addresses, self._observers()
        )
        add_info_routes(app, manager, self._status, self._metrics)
        add_native_routes(app, manager)
        renderer = ChatRenderer(
            self._tokenizer, self._args.tool_call_parser, self._args.reasoning_parser
        )
        if renderer.tool_format is not None:
            self._status.tool_call_parser = renderer.tool_format.name
        name, page_size = self._status.model_name, self._status.model_info["page_size"]
        add_openai_routes(app, manager, name)
        add_chat_route(app, manager, renderer, name)
        add_anthropic_routes(app, manager, renderer, name, page_size)
        add_tokenize_routes(app, manager, renderer)
        dashboard = Dashboard(manager, self._status, self._latency)
        dashboard.add_routes(app)

        def died(reason: str) -> None:
            self._death = self._death or reason
            logger.error("%s; the server ends", reason)
            manager.fail(reason)
            self._server.drain_seconds = 0.0
            self._server.should_exit = True

        self._group.watch(loop, died)
        warmup = loop.create_task(self._warm_up(manager))
        try:
            yield
        finally:
            self._group.unwatch(loop)
            warmup.cancel()
            await asyncio.gather(warmup, return_exceptions=True)
            await dashboard.close()
            await manager.close()

    def _observers(self) -> list[RequestObserver]:
        observers: list[RequestObserver] = [self._metrics, self._latency]
        if self._args.log_requests:
            observers.append(RequestLog(self._args.log_requests_level, self._tokenizer))
        return observers

    def _num_running(self) -> int:
        return 0 if self._manager is None else self._manager.num_running

    def _end_requests(self) -> None:
        if self._manager is not None:
            self._manager.fail("the server is shutting down")

    async def _warm_up(self, manager: TokenizerManager) -> None:
        """Answers one request before the server says that it is healthy."""
        if not self._args.skip_server_warmup:
            logger.info("Warming up with one request.")
            progress = log_progress(logger, "Warming up", "request")
            progress(0, 1)
            await probe(manager)
            progress(1, 1)
        self._status.ready = True
        logger.info("Ready to serve.")


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no route {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    failure = HttpError(error.status_code, message)
    return json_response(error_body_of(request.url.path)(failure), failure.status)


async def _unexpected(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    failure = HttpError(500, f"internal error: {type(error).__name__}")
    return json_response(error_body_of(request.url.path)(failure), 500)
