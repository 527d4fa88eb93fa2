"""What the examples have in common: command line, endpoint, and the line about the cache."""

from __future__ import annotations

import argparse
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import sglang as sgl

URL = "http://127.0.0.1:30000"


class Endpoint(sgl.RuntimeEndpoint):
    """The client's endpoint, which also counts where prompt tokens came from.

    Programs call it from many threads, one a branch.
    """

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._lock = threading.Lock()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.by_tier: Counter[str] = Counter()
        """Cached tokens by the format of the pages they came from."""

    def generate(self, s: Any, sampling_params: Any) -> Any:
        text, meta = super().generate(s, sampling_params)
        self._count(meta)
        return text, meta

    def generate_stream(self, s: Any, sampling_params: Any) -> Iterator[Any]:
        meta = None
        for text, meta in super().generate_stream(s, sampling_params):
            yield text, meta
        if meta is not None:
            self._count(meta)

    def _generate_http_request(self, s: Any, data: Any) -> Any:
        """What `select` calls: one reply, or one a choice."""
        reply = super()._generate_http_request(s, data)
        for one in reply if isinstance(reply, list) else [reply]:
            self._count(one["meta_info"])
        return reply

    def _count(self, meta: dict[str, Any]) -> None:
        with self._lock:
            self.prompt_tokens += meta["prompt_tokens"]
            self.cached_tokens += meta["cached_tokens"]
            self.by_tier.update(meta.get("cached_tokens_by_tier") or {})

    def report(self) -> str:
        """One line: how much of the prompts came from sealed pages."""
        tiers = ", ".join(f"{kind} {count}" for kind, count in sorted(self.by_tier.items()))
        return (
            f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens came from sealed pages"
            f" ({tiers or 'none cached'})"
        )


def main(run: Callable[[Endpoint], None], description: str | None) -> None:
    """Runs an example against a running server and prints the line about the cache."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default=URL, help="of the server (default: %(default)s)")
    parser.add_argument(
        "--chat-template",
        default="chatml",
        help="how the model writes roles, as the client names it (default: %(default)s)",
    )
    args = parser.parse_args()
    endpoint = Endpoint(args.url, chat_template_name=args.chat_template)
    run(endpoint)
    print(endpoint.report())
