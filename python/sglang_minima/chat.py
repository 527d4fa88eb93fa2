"""A chat in the terminal against a running server: `python -m sglang_minima.chat`.

After every reply it tells how much of the prompt came from cached pages, by page format. Text goes
to stdout and everything else to stderr, so it can stand in a pipe: one question per line.
"""

from __future__ import annotations

import argparse
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress

from sglang_minima.chat_client import ChatClient, ChatError, Statistics

_HELP = """\
/reset           forget the conversation (the system prompt stays)
/system TEXT     start over with this system prompt; without TEXT: show it
/exit            end (also Ctrl-D); Ctrl-C stops a reply"""
_DIM, _PLAIN = "\033[2m", "\033[0m"


def main(argv: list[str] | None = None) -> int:
    """Runs the chat; returns 1 when a question got no answer."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_minima.chat",
        description="Chat with a running server.",
        epilog=f"commands:\n{_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="of the server (default: %(default)s)"
    )
    parser.add_argument("--api-key", help="key of the server, if it has one")
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest reply, in tokens")
    parser.add_argument("--temperature", type=float, default=0.7, help="default: %(default)s")
    options = parser.parse_args(argv)
    if urllib.parse.urlsplit(options.url).scheme not in ("http", "https"):
        parser.error(f"--url {options.url}: not an address such as http://127.0.0.1:30000")
    client = ChatClient(options.url, options.api_key, options.max_tokens, options.temperature)
    return _Chat(client, options.system).run()


class _Chat:
    def __init__(self, client: ChatClient, system: str) -> None:
        self._client = client
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._dims = sys.stderr.isatty()
        self._reset()

    def run(self) -> int:
        failed = False
        try:
            self._note(f"{self._client.model()} at {self._client.url}; /help lists the commands")
            for line in self._lines():
                if line == "/exit":
                    break
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    failed = not self._turn(line) or failed
        except ChatError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return int(failed)

    def _lines(self) -> Iterator[str]:
        if not self._interactive:
            yield from (line.strip() for line in sys.stdin)
            return
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() its editing keys)
        while True:
            try:
                yield input("> ").strip()
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                return

    def _command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        if name == "/reset":
            self._reset()
            self._note("the conversation is forgotten")
        elif name == "/system" and text.strip():
            self._system = text.strip()
            self._reset()
            self._note("a new conversation with this system prompt")
        elif name == "/system":
            self._note(self._system or "no system prompt")
        else:
            self._note(_HELP if name == "/help" else f"no command {name}\n{_HELP}")

    def _reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def _turn(self, text: str) -> bool:
        """One question and its answer; a failed one leaves no trace in the conversation."""
        asked = [*self._messages, {"role": "user", "content": text}]
        parts: list[str] = []
        reply = self._client.ask(asked)
        try:
            for part in reply:
                parts.append(part)
                print(part, end="", flush=True)
        except KeyboardInterrupt:
            reply.close()
            self._note("\n(stopped)")
        except ChatError as error:
            print(end="\n" if parts else "", flush=True)
            print(f"error: {error}", file=sys.stderr)
            return False
        print(flush=True)
        self._messages = [*asked, {"role": "assistant", "content": "".join(parts)}]
        if self._client.last is not None:
            self._note(describe(self._client.last))
        return True

    def _note(self, text: str) -> None:
        print(f"{_DIM}{text}{_PLAIN}" if self._dims else text, file=sys.stderr, flush=True)


def describe(turn: Statistics) -> str:
    """One line about what a turn cost."""
    cached = sum(turn.cached.values())
    tiers = ", ".join(f"{count} {tier}" for tier, count in turn.cached.items() if count)
    parts = [
        f"prompt {turn.prompt_tokens} tokens: {cached} cached{f' ({tiers})' if tiers else ''}, "
        f"{turn.prompt_tokens - cached} computed",
        f"first token after {turn.first_token_seconds:.2f} s",
    ]
    if turn.tokens_per_second is not None:
        parts.append(f"{turn.completion_tokens} tokens at {turn.tokens_per_second:.1f} tokens/s")
    return f"[{'; '.join(parts)}]"


if __name__ == "__main__":
    sys.exit(main())
