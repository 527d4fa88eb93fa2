"""The terminal chat, as a program: in a pipe and on a terminal. The fake server repeats prompts."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from server_kit import HERE, RunningServer, free_port
from tiny_kit import eventually

from sglang_minima.chat import describe, main
from sglang_minima.chat_client import ChatClient, ChatError, Statistics

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [*(str(HERE.parents[1] / root) for root in ("python", "kernels", "radix"))]
    ),
}


def chat(server: RunningServer, lines: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_minima.chat", "--url", server.url, *flags]
    return subprocess.run(
        command, input=lines, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )


def test_a_server_with_a_key(scripted: RunningServer) -> None:
    with pytest.raises(ChatError, match=r"key is missing or wrong \(status 401\); --api-key KEY"):
        ChatClient(scripted.url).model()
    assert ChatClient(scripted.url, "sesame").model()


def test_in_a_pipe(fake: RunningServer) -> None:
    lines = "one\n\n/system Be brief.\n/system\ntwo\n/bogus\n/reset\nthree\n/exit\nfour\n"
    done = chat(fake, lines, "--max-tokens", "12", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    # The fake model repeats the prompt: the role and the text of its first message.
    assert done.stdout == "user\none\n" + "system\nBe b\n" * 2
    notes = done.stderr.splitlines()
    assert notes[0] == f"fake-model at {fake.url}; /help lists the commands"
    turns = [note for note in notes if note.startswith("[prompt")]
    assert len(turns) == 3
    # A speed is told only where a reply came in pieces: a quick one may come at once.
    assert all("2 cached (2 fp8)" in turn for turn in turns)
    assert all(turn.endswith((" s]", " tokens/s]")) for turn in turns)
    assert "Be brief." in notes
    assert any("no command /bogus" in note for note in notes)
    assert any("the conversation is forgotten" in note for note in notes)


def test_a_conversation_grows_and_a_refusal_leaves_it_alone(fake: RunningServer) -> None:
    long = "x" * 600
    done = chat(fake, f"one\n{long}\ntwo\n", "--max-tokens", "4")
    assert done.returncode == 1
    assert "(status 400)" in done.stderr
    first, second = [
        int(note.split()[1]) for note in done.stderr.splitlines() if note.startswith("[prompt")
    ]
    # The second prompt has both questions and the first answer, and nothing of the refused one.
    assert first < second < first + 60


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["--url", url]) == 1
    assert f"error: no answer from {url}: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--url", "localhost:30000"])


def test_closing_a_reply_ends_the_request(fake: RunningServer) -> None:
    client = ChatClient(fake.url, max_tokens=400)
    reply = client.ask([{"role": "user", "content": "hello"}])
    assert next(reply)
    reply.close()
    assert client.last is None
    eventually(lambda: not fake.get("/get_load").json()[0]["num_reqs"])


def test_errors_of_a_server_are_told() -> None:
    with pytest.raises(ChatError, match="no answer"):
        ChatClient(f"http://127.0.0.1:{free_port()}").model()


def test_the_line_of_a_turn() -> None:
    turn = Statistics(100, 21, {"fp8": 64, "tq3": 0}, 0.25, 40.0)
    assert describe(turn) == (
        "[prompt 100 tokens: 64 cached (64 fp8), 36 computed; first token after 0.25 s; "
        "21 tokens at 40.0 tokens/s]"
    )
    assert describe(turn._replace(tokens_per_second=None)).endswith("0.25 s]")


@pytest.mark.skipif(not Path("/dev/ptmx").exists(), reason="no terminals here")
def test_on_a_terminal(fake: RunningServer) -> None:
    child, terminal = pty.fork()
    if child == 0:
        # Whoever starts the tests in the background may have made them ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        command = [sys.executable, "-m", "sglang_minima.chat", "--url", fake.url]
        os.execve(sys.executable, [*command, "--max-tokens", "6"], ENVIRONMENT)
    seen = ""

    def appears(text: str, seconds: float) -> bool:
        nonlocal seen
        end = time.monotonic() + seconds
        while text not in seen:
            if not select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
            seen += os.read(terminal, 4096).decode()
        seen = seen[seen.index(text) + len(text) :]
        return True

    def until(text: str) -> None:
        assert appears(text, 60), seen

    try:
        until("> ")
        os.write(terminal, b"hello\n")
        until("[prompt ")
        until("s]")
        until("> ")
        # Ctrl-C at the prompt clears the line. Python's input() shows its prompt a moment before it
        # waits, and a signal in that moment is seen at the next key only.
        for _ in range(5):
            os.write(terminal, b"\x03")
            if appears("> ", 5):
                break
        else:
            raise AssertionError(seen)
        os.write(terminal, b"\x04")  # Ctrl-D ends
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        os.close(terminal)
