"""The detokenizer process: token batches in, text deltas out.

A stream never shows text that may still become part of a stop string, nor half a character.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from sglang_minima.channels import Addresses, Receiver, Sender
from sglang_minima.messages import FinishReason, TextBatch, TextOutput, TokenBatch, TokenOutput
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.incremental import IncrementalDecoder
from sglang_minima.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def held_back(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of one of `stops`."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


@dataclass
class _Stream:
    """Text state of one request."""

    decoder: IncrementalDecoder
    stop: list[str]
    text: str = ""
    """Everything decoded so far."""
    sent: int = 0
    """Length of the part of `text` that the client has."""
    last: int = field(default=0)
    """Where the text of the latest push begins: a match of a stop ends behind it."""

    def push(self, ids: list[int], final: bool) -> None:
        self.last = len(self.text)
        self.text += self.decoder.push(ids)
        if final:
            self.text += self.decoder.flush()

    def cut_before(self, matched: str) -> None:
        """Ends the text before the match that the latest push completed."""
        start = self.text.find(matched, max(0, self.last - len(matched) + 1))
        if start < 0:
            logger.warning("a matched stop of %d characters is not in the text", len(matched))
            return
        self.text = self.text[:start]

    def release(self, final: bool) -> tuple[str, int]:
        """The text to send now, and how many characters to take back before it."""
        end = len(self.text)
        if not final:
            end -= held_back(self.text[self.sent :], self.stop)
        trim = max(0, self.sent - end)
        delta = self.text[self.sent : end]
        self.sent = end
        return delta, trim


class Detokenizer:
    """Turns the token outputs of all running requests into text outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}

    def decode(self, output: TokenOutput) -> TextOutput:
        """The text of one output; the last one of a request releases its state."""
        stream = self._streams.get(output.rid)
        if stream is None:
            decoder = IncrementalDecoder(
                self._tokenizer,
                output.prompt_tail or [],
                output.skip_special_tokens,
                output.spaces_between_special_tokens,
            )
            stream = self._streams[output.rid] = _Stream(decoder, output.stop)
            output.stop = []  # the HTTP process has no use for them
        finish = output.finish
        stream.push(_text_ids(output), final=finish is not None)
        if finish is not None:
            del self._streams[output.rid]
            if _is_text_match(finish) and not output.no_stop_trim:
                stream.cut_before(str(finish.matched))
        text, trim = stream.release(final=finish is not None)
        return TextOutput(text, output, trim)


def _is_text_match(finish: FinishReason) -> bool:
    return finish.type == "stop" and isinstance(finish.matched, str)


def _text_ids(output: TokenOutput) -> list[int]:
    """The new ids without the stop token that ended the request."""
    finish, ids = output.finish, output.new_ids
    if finish is None or finish.type != "stop" or output.no_stop_trim:
        return ids
    if isinstance(finish.matched, int) and ids and ids[-1] == finish.matched:
        return ids[:-1]
    return ids


def run_detokenizer(args: ServerArgs, addresses: Addresses, ready: Connection) -> None:
    """Main function of the process; reports {"ok": True, "info": {}} through `ready`."""
    tokenizer = Tokenizer.load(args.tokenizer_path or str(args.model_path))
    detokenizer = Detokenizer(tokenizer)
    receiver: Receiver[TokenBatch] = Receiver(addresses.detokenizer, TokenBatch)
    sender = Sender(addresses.frontend)
    ready.send({"ok": True, "info": {}})
    ready.close()
    while True:
        batch = receiver.receive(timeout=None)
        if batch is not None:
            sender.send(TextBatch([detokenizer.decode(output) for output in batch.outputs]))
