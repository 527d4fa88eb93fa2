"""`Engine`: the same engine without HTTP, for programs that hold the model themselves."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import difflib
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from sglang_minima.entrypoints.generate_input import GenerateCall, parse_generate
from sglang_minima.entrypoints.info_api import ServerStatus, server_info
from sglang_minima.entrypoints.native_api import collect_replies, stream_replies
from sglang_minima.processes import (
    SCHEDULER,
    LaunchError,
    ProcessDied,
    load_tokenizer,
    resolve_model,
    start,
)
from sglang_minima.server_args import ServerArgs
from sglang_minima.settings import ArgumentError
from sglang_minima.tokenization.manager import TokenizerManager
from sglang_minima.tokenization.prompts import ModelLimits
from sglang_minima.tokenization.state import EngineDead

_GUARD = 'A script that makes an Engine needs `if __name__ == "__main__":` around it.'
T = TypeVar("T")
Reply = Any
"""One `/generate` reply (text, output_ids, meta_info), or a list of them for a batch or n > 1."""


class Engine:
    """A model in this program: scheduler and detokenizer run in processes of their own.

    `generate` and `async_generate` take what `/generate` takes and return what it answers.

        with Engine(model_path="...") as engine:
            print(engine.generate("The capital of France is", {"max_new_tokens": 8})["text"])

    Args:
        scheduler: main function of the scheduler process, as module:function.
        settings: fields of `ServerArgs`; `log_level` is "error" unless given.

    Raises:
        ArgumentError: a setting is wrong.
        LaunchError: the model cannot be loaded.
    """

    def __init__(self, *, scheduler: str = SCHEDULER, **settings: Any) -> None:
        known = [entry.name for entry in dataclasses.fields(ServerArgs)]
        for name in settings.keys() - set(known):
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ArgumentError(f"there is no setting {name!r}{hint}")
        args = ServerArgs(**{"log_level": "error", **settings})
        logging.getLogger("sglang_minima").setLevel(args.log_level.upper())
        resolved = resolve_model(args)
        self._group = start(resolved, scheduler)
        try:
            self.tokenizer = load_tokenizer(resolved)
            info = self._group.wait_ready()
        except ProcessDied as error:
            self._group.stop()
            raise LaunchError(f"{error}. {_GUARD}") from None
        except BaseException:
            self._group.stop()
            raise
        self._status = ServerStatus.begin(args, str(resolved.model_path), info)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        self._manager = self._run(self._connect(args, ModelLimits.from_info(info)))
        atexit.register(self.shutdown)

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Reply | Iterator[dict[str, Any]]:
        """Generates for one prompt or a batch.

        Args:
            prompt: text(s); or give `input_ids`.
            sampling_params: for all prompts, or one object a prompt.
            input_ids: token ids instead of text.
            stream: return an iterator of growing replies instead of the final one.
            options: other fields of the `/generate` body (return_logprob, extra_key, rid, ...).

        Raises:
            InvalidRequest: the request cannot be served as it stands.
            QueueFull: too many requests wait.
            EngineDead: a process of the engine died.
            HttpError: the scheduler refused a sequence; `status` says how.
        """
        call = self._parse(prompt, sampling_params, input_ids, options)
        if stream:
            return self._iterate(call)
        return self._run(self._generate(call))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> Reply | AsyncIterator[dict[str, Any]]:
        """`generate` for a program with an event loop; with `stream` an asynchronous iterator."""
        call = self._parse(prompt, sampling_params, input_ids, options)
        if stream:
            return self._async_iterate(call)
        return await asyncio.wrap_future(self._submit(self._generate(call)))

    def flush_cache(self) -> bool:
        """Empties the prefix cache; False (and nothing happens) while requests run."""
        return self._run(self._manager.control("flush_cache")).ok

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Aborts the request, or the batch, with this rid; or everything."""

        async def abort() -> None:
            if abort_all:
                self._manager.abort_all()
            elif rid:
                self._manager.abort(rid)

        self._run(abort())

    def get_server_info(self) -> dict[str, Any]:
        """What `/server_info` answers."""
        return server_info(self._status, dict(self._run(self._manager.control("info")).value))

    def shutdown(self) -> None:
        """Ends the engine's processes; can be called more than once."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.shutdown)
        self._run(self._disconnect())
        self._group.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _parse(
        self, prompt: Any, sampling_params: Any, input_ids: Any, options: dict[str, Any]
    ) -> GenerateCall:
        body = {
            **options,
            "text": prompt,
            "input_ids": input_ids,
            "sampling_params": sampling_params,
        }
        return parse_generate(body, self._manager.limits.vocab_size, self._manager.bounds)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        if self._loop.is_closed():
            work.close()
            raise EngineDead("the engine was shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the engine's loop and waits for it."""
        result: T = self._submit(work).result()
        return result

    async def _connect(self, args: ServerArgs, limits: ModelLimits) -> TokenizerManager:
        manager = TokenizerManager(args, limits, self.tokenizer, self._group.addresses)
        self._group.watch(self._loop, manager.fail)
        return manager

    async def _disconnect(self) -> None:
        self._group.unwatch(self._loop)
        await self._manager.close()

    async def _generate(self, call: GenerateCall) -> Reply:
        generation = await self._manager.submit(call.prompts, call.group)
        try:
            await generation.wait()
        finally:
            generation.abort()
        return collect_replies(call, generation)

    async def _replies(self, call: GenerateCall) -> AsyncIterator[dict[str, Any]]:
        generation = await self._manager.submit(call.prompts, call.group)
        try:
            async for reply in stream_replies(call, generation):
                yield reply
        finally:
            generation.abort()

    def _iterate(self, call: GenerateCall) -> Iterator[dict[str, Any]]:
        replies = self._replies(call)
        try:
            while (reply := self._run(_next(replies))) is not None:
                yield reply
        finally:
            if not self._loop.is_closed():
                self._run(_close(replies))

    async def _async_iterate(self, call: GenerateCall) -> AsyncIterator[dict[str, Any]]:
        replies = self._replies(call)
        try:
            while (reply := await asyncio.wrap_future(self._submit(_next(replies)))) is not None:
                yield reply
        finally:
            if not self._loop.is_closed():
                await asyncio.wrap_future(self._submit(_close(replies)))


async def _next(replies: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(replies, None)


async def _close(replies: Any) -> None:
    await replies.aclose()
