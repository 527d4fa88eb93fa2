"""Starts llama.cpp's server, natively built or out of the package xllamacpp, with named settings.

    python benchmark/llama_server.py -m MODEL.gguf --port 8080 -np 4 ...

runs the prebuilt server of xllamacpp with those of llama-server's arguments that the benchmark
uses, so that both builds are started with the same command line.
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from serving import stop

SLOT_TOKENS = 4096
START_SECONDS = 120.0
_MIB = 1 << 20


@dataclass(frozen=True)
class LlamaSettings:
    """What decides how llama.cpp shares and stores prefixes; the defaults are its own."""

    slots: int = 4
    unified: bool = True
    """One KV buffer for all slots, or an equal part of it for each."""
    kv_type: str = "f16"
    """f16 or q8_0."""
    flash: str = "auto"
    """auto (which means on, on a CPU) or off."""
    cache_reuse: int = 0
    """Shortest piece of a cached prompt that is moved to another position, 0: none."""
    idle_cache: bool = True
    """Idle slots are copied to the prompt cache in memory and cleared."""
    similarity: float = 0.1
    """Share of a prompt that a slot must hold to be taken for it, and what else it holds is lost.
    0: the slot idle for longest is taken, after what it holds went to the prompt cache and the
    best match came from there."""

    @property
    def possible(self) -> bool:
        """False where llama-server refuses to start: quantised V needs flash attention."""
        return self.kv_type == "f16" or self.flash != "off"

    def arguments(self) -> list[str]:
        return [
            *("-np", str(self.slots), "-c", str(SLOT_TOKENS * self.slots)),
            "--kv-unified" if self.unified else "--no-kv-unified",
            *("-ctk", self.kv_type, "-ctv", self.kv_type, "-fa", self.flash),
            *("--cache-reuse", str(self.cache_reuse), "-sps", str(self.similarity)),
            "--cache-idle-slots" if self.idle_cache else "--no-cache-idle-slots",
        ]

    @classmethod
    def parse(cls, text: str) -> LlamaSettings:
        """From "slots=8 kv_type=q8_0".

        Raises:
            ValueError: a name is unknown or a value is not of its type.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        values: dict[str, object] = {}
        for item in text.split():
            name, _, value = item.partition("=")
            kind = kinds.get(name)
            if kind in ("int", "float"):
                values[name] = int(value) if kind == "int" else float(value)
            elif kind == "bool" and value in ("on", "off"):
                values[name] = value == "on"
            elif kind == "str" and value:
                values[name] = value
            else:
                raise ValueError(f"{item!r} is not a setting; names: {', '.join(kinds)}")
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """As `parse` reads it; what is at its default is left out, but for the slots."""
        parts = [f"slots={self.slots}"]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown = {True: "on", False: "off"}[value] if field.type == "bool" else value
                parts.append(f"{field.name}={shown}")
        return " ".join(parts)


@dataclass(frozen=True)
class LlamaBuild:
    """A llama.cpp server that can be started here."""

    name: str
    command: tuple[str, ...]

    @classmethod
    def native(cls, binary: Path) -> LlamaBuild:
        return cls("llama.cpp native", (str(binary),))

    @classmethod
    def prebuilt(cls) -> LlamaBuild:
        return cls("llama.cpp prebuilt", (sys.executable, str(Path(__file__).resolve())))


@dataclass(frozen=True)
class LlamaServer:
    """A running server and its log, where llama.cpp tells what its routes do not."""

    url: str
    log: Path
    context: int
    """Tokens in the KV buffer."""

    @property
    def instruction_set(self) -> str:
        """The CPU features it was compiled for, e.g. "AVX2 FMA"."""
        found = re.search(r"CPU : (.*)", self.log.read_text(errors="replace"))
        return " ".join(re.findall(r"(\w+) = 1", found[1])) if found else "not told"

    @property
    def kv_reserved_bytes(self) -> int:
        """The KV buffer, allocated whole at the start."""
        sizes = re.findall(r"KV buffer size = +([\d.]+) MiB", self.log.read_text(errors="replace"))
        return round(sum(map(float, sizes)) * _MIB)

    @property
    def kv_bytes_per_token(self) -> float:
        return self.kv_reserved_bytes / self.context

    @property
    def prompt_cache_bytes(self) -> int:
        """The prompts kept in memory beside the KV buffer, as last told."""
        text = self.log.read_text(errors="replace")
        told = re.findall(r"cache state: \d+ prompts, ([\d.]+) MiB", text)
        return round(float(told[-1]) * _MIB) if told else 0


@contextmanager
def running_llama(
    build: LlamaBuild, model: Path, settings: LlamaSettings, threads: int
) -> Iterator[LlamaServer]:
    """The server at a free port, ended afterwards.

    Raises:
        RuntimeError: it did not become healthy; the message ends with what it printed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Level 4 is the lowest that tells the size of the prompt cache: a few lines per request.
    arguments = ["-m", str(model), "--port", str(port), "-t", str(threads), "-lv", "4"]
    arguments += ["--slots", *settings.arguments()]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        url = f"http://127.0.0.1:{port}"
        server = LlamaServer(url, Path(log.name), SLOT_TOKENS * settings.slots)
        process = subprocess.Popen(
            [*build.command, *arguments], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait_until_healthy(server, process)
            yield server
        finally:
            stop(process)


def _wait_until_healthy(server: LlamaServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    output = server.log.read_text(errors="replace")[-4000:]
    raise RuntimeError(f"llama.cpp did not start (exit status {process.poll()}):\n{output}")


def serve_prebuilt(argv: Sequence[str]) -> None:
    """Serves until the process is ended."""
    import xllamacpp

    parser = argparse.ArgumentParser(description="The prebuilt llama.cpp server of xllamacpp.")
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-t", dest="threads", type=int, required=True)
    parser.add_argument("-lv", dest="verbosity", type=int, default=3)
    parser.add_argument("--slots", action="store_true")
    parser.add_argument("-np", dest="parallel", type=int, required=True)
    parser.add_argument("-c", dest="context", type=int, required=True)
    parser.add_argument("--kv-unified", action=argparse.BooleanOptionalAction, required=True)
    parser.add_argument("-ctk", dest="k_type", required=True)
    parser.add_argument("-ctv", dest="v_type", required=True)
    parser.add_argument("-fa", dest="flash", choices=("auto", "on", "off"), required=True)
    parser.add_argument("--cache-reuse", type=int, required=True)
    parser.add_argument("-sps", dest="similarity", type=float, required=True)
    parser.add_argument("--cache-idle-slots", action=argparse.BooleanOptionalAction, required=True)
    options = parser.parse_args(argv)
    flash = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}[options.flash]
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.port = options.port
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.verbosity = options.verbosity
    params.endpoint_slots = options.slots
    params.n_parallel = options.parallel
    params.n_ctx = options.context
    params.kv_unified = options.kv_unified
    params.cache_type_k = xllamacpp.ggml_type[f"GGML_TYPE_{options.k_type.upper()}"]
    params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{options.v_type.upper()}"]
    params.flash_attn_type = xllamacpp.llama_flash_attn_type[f"LLAMA_FLASH_ATTN_TYPE_{flash}"]
    params.n_cache_reuse = options.cache_reuse
    params.slot_prompt_similarity = options.similarity
    params.cache_idle_slots = options.cache_idle_slots
    print(xllamacpp.get_system_info(), flush=True)
    server = xllamacpp.Server(params)
    print(f"prebuilt server at {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    serve_prebuilt(sys.argv[1:])
