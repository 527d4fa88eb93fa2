"""Two servers behind `sglang-router`: its cache-aware policy against round robin.

    python benchmark/router.py

Shops have a system prompt of their own, and customers who ask one question each; questions of all
shops come mixed, a fixed number at a time. A router that knows nothing of prefixes has every worker
compute (and keep) every system prompt; a cache-aware one gives each shop a worker. Run with ample
KV memory, and with memory in which one worker cannot keep the prompts of all shops. Every case
starts its own workers, one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from common import Claim, Record, format_claims, format_table
from prefix_sharing import Client, settled_info, take_turn
from serving import running_server
from shop_talk import system_prompt

from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICIES = ("cache_aware", "round_robin")
MEMORY = {"ample": "64k", "tight": "2560"}
"""--max-total-tokens of a worker: tokens as FP8 pages (about 2.4 times that once they are TQ3)."""
SYSTEM_TOKENS = 512
_START_SECONDS = 60.0


@contextmanager
def running_router(workers: Sequence[str], policy: str) -> Iterator[str]:
    """A router in front of healthy workers; yields its URL.

    Raises:
        RuntimeError: it did not become ready.
    """
    port, metrics = _free_port(), _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics), "--policy", policy]
    command += ["--log-level", "error", "--worker-urls", *workers]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the router did not start; is sglang-router installed?")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def make_requests(system: str, shops: int, customers: int) -> list[Client]:
    """One client a request, in the order of arrival."""
    clients = [
        Client(f"You work in shop {shop * 7919}. {system}", random.Random(1000 * shop + customer))
        for shop in range(shops)
        for customer in range(customers)
    ]
    random.Random(0).shuffle(clients)
    return clients


async def drive(
    router: str, workers: Sequence[str], clients: list[Client], at_once: int, new_tokens: int
) -> dict[str, Any]:
    """Sends all requests through the router, `at_once` at a time; returns one row."""
    timeout = aiohttp.ClientTimeout(total=None)
    waiting = iter(clients)
    async with aiohttp.ClientSession(router, timeout=timeout) as session:

        async def customer() -> None:
            for client in waiting:
                await take_turn(session, client, new_tokens)

        started = time.perf_counter()
        await asyncio.gather(*(customer() for _ in range(at_once)))
        seconds = time.perf_counter() - started
    served = []
    for worker in workers:
        async with aiohttp.ClientSession(worker) as session:
            info = await settled_info(session)
            served.append(info["statistics"]["requests_completed"])
    return summarise(clients, seconds, served)


def summarise(clients: Sequence[Client], seconds: float, served: Sequence[int]) -> dict[str, Any]:
    """One row; `served` is the number of requests that every worker answered."""
    ttft = [value for client in clients for value in client.ttft]
    prompt = sum(sum(client.prompt_tokens) for client in clients)
    cached = sum(sum(client.cached_tokens) for client in clients)
    output = sum(sum(client.output_tokens) for client in clients)
    return {
        "requests": len(clients),
        "total_s": seconds,
        "requests_per_s": len(clients) / seconds,
        "prompt_tok_s": prompt / seconds,
        "output_tok_s": output / seconds,
        "hit_rate": cached / prompt,
        "prompt_tokens": prompt,
        "computed_tokens": prompt - cached,
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p95_s": float(np.quantile(ttft, 0.95)),
        "busiest_share": max(served) / sum(served),
        "preemptions": sum(client.preemptions for client in clients),
    }


def make_claims(rows: Sequence[dict[str, Any]], workers: int) -> list[Claim]:
    """What keeping a prefix on one worker should give."""
    claims = []
    by_case = {(row["memory"], row["policy"]): row for row in rows}
    for memory in dict.fromkeys(row["memory"] for row in rows):
        aware, robin = (by_case[memory, policy] for policy in POLICIES)
        name = f"{memory} memory: prompt tokens computed, cache_aware / round_robin"
        ratio = aware["computed_tokens"] / robin["computed_tokens"]
        claims.append(Claim.at_most(name, ratio, 0.8, "x"))
        name = f"{memory} memory: requests per second, cache_aware / round_robin"
        ratio = aware["requests_per_s"] / robin["requests_per_s"]
        claims.append(Claim.at_least(name, ratio, 1.1, "x"))
        name = f"{memory} memory: share of the busiest worker, cache_aware"
        claims.append(Claim.at_most(name, aware["busiest_share"], 1.5 / workers, ""))
    return claims


def plot(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    memories = list(dict.fromkeys(row["memory"] for row in rows))
    at = np.arange(len(memories))
    quantities = (
        ("hit_rate", "share of prompt tokens from cache", "{:.0%}"),
        ("requests_per_s", "requests per second", "{:.2f}"),
        ("ttft_p50_s", "time to first token, median (s)", "{:.2f}"),
    )
    for axis, (key, label, shown) in zip(axes, quantities, strict=True):
        for offset, policy in zip((-0.2, 0.2), POLICIES, strict=True):
            values = [row[key] for row in rows if row["policy"] == policy]
            bars = axis.bar(at + offset, values, 0.4, label=policy)
            axis.bar_label(bars, [shown.format(value) for value in values], padding=2)
        axis.set_xticks(at, [f"{memory} memory" for memory in memories])
        axis.set_ylabel(label)
        axis.margins(y=0.15)
    axes[0].legend(loc="lower left")
    figure.suptitle(title)
    return figure


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description="sglang-router: cache_aware against round robin.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shops", type=int, default=12)
    parser.add_argument("--customers", type=int, default=5, help="of every shop")
    parser.add_argument("--at-once", type=int, default=8, help="requests under way together")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens of every answer")
    options = parser.parse_args()
    record = Record("router")
    system = system_prompt(Tokenizer.load(resolve_model_path(None)), SYSTEM_TOKENS)
    rows = []
    for memory, tokens in MEMORY.items():
        for policy in POLICIES:
            print(f"{memory} memory, {policy}", file=sys.stderr, flush=True)
            arguments = ["--max-total-tokens", tokens, "--cpu-threads", "1"]
            with ExitStack() as stack:
                workers = [
                    stack.enter_context(running_server(arguments)) for _ in range(options.workers)
                ]
                router = stack.enter_context(running_router(workers, policy))
                clients = make_requests(system, options.shops, options.customers)
                work = drive(router, workers, clients, options.at_once, options.new_tokens)
                rows.append({"memory": memory, "policy": policy, **asyncio.run(work)})
    claims = make_claims(rows, options.workers)
    columns = {"memory": "", "policy": "", "requests_per_s": ".2f", "hit_rate": ".1%"}
    columns |= {"computed_tokens": "d", "prompt_tok_s": ".0f", "output_tok_s": ".1f"}
    columns |= {"ttft_p50_s": ".2f", "ttft_p95_s": ".2f", "busiest_share": ".0%"}
    columns |= {"preemptions": "d"}
    print(format_table(rows, columns))
    print(format_claims(claims))
    title = f"{options.shops} system prompts of {SYSTEM_TOKENS} tokens, {options.workers} workers"
    record.write(rows, claims, plot(rows, f"{title}, {options.at_once} requests at a time"))


if __name__ == "__main__":
    main()
