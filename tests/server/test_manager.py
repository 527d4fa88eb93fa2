"""What the tokenizer manager does when something inside the HTTP process fails."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_minima.channels import Addresses, Sender
from sglang_minima.messages import TextBatch, TextOutput, TokenOutput
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.inputs import PromptInput
from sglang_minima.tokenization.manager import TokenizerManager
from sglang_minima.tokenization.prompts import ModelLimits
from sglang_minima.tokenization.state import EngineDead, RequestState
from sglang_minima.tokenization.tokenizer import Tokenizer


class FailingObserver:
    def received(self, state: RequestState) -> None:
        pass

    def progressed(self, state: RequestState, new_tokens: int) -> None:
        raise ZeroDivisionError

    def finished(self, state: RequestState) -> None:
        raise AssertionError("never reached")


def run_with_manager(
    model_dir: Path, work: Callable[[TokenizerManager, Sender], Awaitable[None]]
) -> None:
    """Runs `work` with a manager whose observer fails, and a sender in the scheduler's place."""

    async def main() -> None:
        addresses = Addresses.create()
        manager = TokenizerManager(
            ServerArgs(),
            ModelLimits(vocab_size=258, context_length=512, max_total_tokens=400),
            Tokenizer.load(str(model_dir)),
            addresses,
            [FailingObserver()],
        )
        sender = Sender(addresses.frontend)
        try:
            await asyncio.wait_for(work(manager, sender), 20)  # type: ignore[arg-type]
        finally:
            sender.close()
            await manager.close()
            shutil.rmtree(addresses.directory)

    asyncio.run(main())


def prompt(**sampling: Any) -> PromptInput:
    return PromptInput(prompt=[5, 6], sampling=SamplingParams(**sampling), rid="r")


def test_a_fault_while_receiving_fails_requests_instead_of_hanging(model_dir: Path) -> None:
    async def work(manager: TokenizerManager, sender: Sender) -> None:
        generation = await manager.submit([prompt()])
        output = TokenOutput("r", [7], None, 2, 1, 0)
        sender.send(TextBatch([TextOutput("a", output)]))
        with pytest.raises(EngineDead, match="ZeroDivisionError"):
            await generation.wait()
        assert manager.dead is not None
        with pytest.raises(EngineDead):
            await manager.submit([prompt()])

    run_with_manager(model_dir, work)


def test_a_request_that_cannot_be_sent_is_not_running(model_dir: Path) -> None:
    async def work(manager: TokenizerManager, sender: Sender) -> None:
        unsendable = prompt(top_k=1 << 70)
        with pytest.raises(OverflowError):
            msgspec.msgpack.encode(unsendable.sampling)
        with pytest.raises(OverflowError):
            await manager.submit([unsendable])
        assert manager.num_running == 0

    run_with_manager(model_dir, work)
