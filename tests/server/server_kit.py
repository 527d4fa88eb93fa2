"""Starts servers in processes of their own, and makes a model directory without weights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import requests
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

HERE = Path(__file__).parent
START_SECONDS = 180.0
FAKE_SCHEDULER = "fake_scheduler:run_fake_scheduler"
SPECIALS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class RunningServer:
    """A server in its own process."""

    url: str
    process: subprocess.Popen[str]

    def post(self, path: str, body: object, **kwargs: object) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=60, **kwargs)  # type: ignore[arg-type]

    def get(self, path: str, **kwargs: object) -> requests.Response:
        return requests.get(self.url + path, timeout=60, **kwargs)  # type: ignore[arg-type]

    def end(self, signal_number: int) -> str:
        """Sends a signal, upon which the server must end well; returns what it has printed."""
        self.process.send_signal(signal_number)
        output = self.process.communicate(timeout=30)[0]
        assert self.process.returncode == 0, output
        return output

    def generate(self, body: object, **kwargs: object) -> requests.Response:
        return self.post("/generate", body, **kwargs)


def begin_request(url: str, path: str, body: object, **headers: str) -> HTTPConnection:
    """Sends a request whose answer nobody reads; who closes the connection goes away."""
    connection = HTTPConnection(url.removeprefix("http://"))
    headers = {"Content-Type": "application/json", **headers}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(
    program: list[str], *flags: str, wait: bool = True, port: int | None = None
) -> RunningServer:
    """Starts a server, on a free port unless one is given, and waits until it is healthy."""
    port = port or free_port()
    roots = [str(HERE.parents[1] / root) for root in ("python", "kernels", "radix")]
    path = os.pathsep.join([*roots, str(HERE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, *program, "--port", str(port), *flags],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = RunningServer(f"http://127.0.0.1:{port}", process)
    deadline = time.monotonic() + START_SECONDS
    while wait:
        if process.poll() is not None or time.monotonic() > deadline:
            code = process.poll()
            process.kill()
            output = process.communicate()[0]
            raise RuntimeError(f"the server did not start (exit code {code}):\n{output}")
        try:
            if requests.get(server.url + "/health", timeout=5).status_code == 200:
                break
        except requests.ConnectionError:
            time.sleep(0.05)
    return server


def write_model(directory: Path) -> None:
    """Configuration and byte-level tokenizer (one token a byte) of a model without weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*SPECIALS, *alphabet])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocab),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
