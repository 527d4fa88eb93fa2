"""sglang_minima: an LLM server for prompts that share prefixes.

`Engine` is the offline API; `python -m sglang_minima.launch_server` starts the HTTP server.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> object:
    # Engine pulls in torch and zmq: import it only when somebody asks for it.
    if name == "Engine":
        from sglang_minima.entrypoints.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
