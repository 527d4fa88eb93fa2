"""zmq PUSH/PULL channels that carry one message type each, over ipc sockets.

The receiving end binds, the sending ends connect; messages are MessagePack (see `messages`).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

T = TypeVar("T")


@dataclass(frozen=True)
class Addresses:
    """Where the processes of one server listen."""

    directory: str
    scheduler: str
    detokenizer: str
    frontend: str

    @classmethod
    def create(cls) -> Addresses:
        """New ipc endpoints in a private temporary directory (removed by `Engine`/the server).

        Raises:
            OSError: no temporary directory can be written.
            ValueError: its name is longer than sockets take.
        """
        directory = tempfile.mkdtemp(prefix="sglang_minima_")
        base = Path(directory)
        longest = len(os.fsencode(base / "detokenizer"))
        if longest > zmq.IPC_PATH_MAX_LEN:
            base.rmdir()
            raise ValueError(
                f"the temporary folder {base.parent} is too long a name for sockets by "
                f"{longest - zmq.IPC_PATH_MAX_LEN} bytes"
            )
        return cls(
            directory,
            f"ipc://{base / 'scheduler'}",
            f"ipc://{base / 'detokenizer'}",
            f"ipc://{base / 'frontend'}",
        )


class Sender:
    """Sends messages to one address; never blocks and never drops (unbounded queue)."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Any) -> None:
        self._socket.send(self._encoder.encode(message))

    def close(self, linger: int = 0) -> None:
        """Closes; `linger` is how many milliseconds messages may still take to leave."""
        self._socket.close(linger=linger)


class Receiver(Generic[T]):
    """Receives messages of a union type, in a plain (not asyncio) process."""

    def __init__(self, address: str, message_type: Any) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def receive(self, timeout: float | None) -> T | None:
        """The next message, or None after `timeout` seconds (None waits for ever)."""
        if self._socket.poll(None if timeout is None else int(timeout * 1000)):
            return self._decoder.decode(self._socket.recv())  # type: ignore[no-any-return]
        return None

    def drain(self) -> list[T]:
        """Every message that has already arrived, without waiting."""
        messages: list[T] = []
        while self._socket.poll(0):
            messages.append(self._decoder.decode(self._socket.recv()))
        return messages

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncReceiver(Generic[T]):
    """Receives messages in an asyncio process."""

    def __init__(self, address: str, message_type: Any) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(message_type)

    async def receive(self) -> T:
        return self._decoder.decode(await self._socket.recv())  # type: ignore[no-any-return]

    def close(self) -> None:
        self._socket.close(linger=0)
