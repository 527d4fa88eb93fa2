"""Main functions of children that fail: for a reason that is foreseen, for another, or too late."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import NoReturn

from sglang_minima.channels import Addresses
from sglang_minima.server_args import ServerArgs


def refuse(args: ServerArgs, addresses: Addresses, ready: Connection) -> NoReturn:
    raise ValueError("the weights\nare missing")


def stumble(args: ServerArgs, addresses: Addresses, ready: Connection) -> NoReturn:
    raise LookupError("nobody thought of this")


def fail_later(args: ServerArgs, addresses: Addresses, ready: Connection) -> NoReturn:
    ready.send({"ok": True, "info": {}})
    ready.close()
    raise ValueError("while it served")
