"""Chats that share a system prompt, against real servers: prefix cache on and off, all profiles.

    python benchmark/prefix_sharing.py

16 clients hold a conversation of 4 turns each. All prompts begin with the same system prompt of
1,500 tokens; the clients of a turn send their requests at the same moment, so in the first turn 16
requests with the same uncached prefix arrive together. Requests stream over HTTP (`/generate`,
text in, greedy, a fixed number of new tokens). One server after the other, each started fresh with
the same memory for KV: every profile with the cache on and with --disable-radix-cache.

KV bytes are read from `/server_info` after the last turn, when all pages have settled in their
tiers. The reference is BF16 at 16 bits per value. On a CPU without bfloat16 units the model
computes in float32 and the control profile "bf16" stores float32, twice those bytes: do not compare
with its row, but with the 16-bit price, as the column `vs_16bit` does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from common import Claim, Record, format_claims, format_table
from serving import running_server
from shop_talk import customer_message, system_prompt

from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROFILES = ("minima", "fp8", "bf16")
SYSTEM_TOKENS = 1500
KV_MEMORY = "2g"


@dataclass
class Client:
    """One conversation: the text so far, and what each turn cost."""

    text: str
    random: random.Random
    ttft: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    preemptions: int = 0


async def take_turn(session: aiohttp.ClientSession, client: Client, new_tokens: int) -> None:
    """Sends the conversation, streams the answer and adds it to the conversation."""
    client.text += customer_message(client.random)
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"text": client.text, "sampling_params": sampling, "stream": True}
    started = time.perf_counter()
    first: float | None = None
    reply: dict[str, Any] = {}
    async with session.post("/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            reply = json.loads(line.removeprefix(b"data: "))
            if "error" in reply:
                raise RuntimeError(f"the server answered {reply['error']}")
            if first is None:
                first = time.perf_counter() - started
    meta = reply["meta_info"]
    if first is None or meta["finish_reason"] is None:
        raise RuntimeError("the stream ended before the answer was complete")
    client.ttft.append(first)
    client.prompt_tokens.append(meta["prompt_tokens"])
    client.cached_tokens.append(meta["cached_tokens"])
    client.output_tokens.append(meta["completion_tokens"])
    client.preemptions += meta["num_retractions"]
    client.text += reply["text"]


async def settled_info(session: aiohttp.ClientSession) -> dict[str, Any]:
    """`/server_info` once no page waits for its tier."""
    while True:
        async with session.get("/server_info") as response:
            info: dict[str, Any] = await response.json()
        if info["cache"]["retier_backlog"] == 0 and info["num_running_reqs"] == 0:
            return info
        await asyncio.sleep(0.2)


async def converse(url: str, system: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the whole workload against one server and returns its measurements."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        # Whatever is built or loaded at the first request is not what is measured.
        await take_turn(session, Client("Good morning.", random.Random(0)), 4)
        async with session.post("/flush_cache") as response:
            response.raise_for_status()
        before = await settled_info(session)
        clients = [Client(system, random.Random(i)) for i in range(options.clients)]
        seconds, computed = [], [before["statistics"]["computed_prompt_tokens"]]
        for _ in range(options.turns):
            started = time.perf_counter()
            await asyncio.gather(*(take_turn(session, c, options.new_tokens) for c in clients))
            seconds.append(time.perf_counter() - started)
            async with session.get("/server_info") as response:
                computed.append((await response.json())["statistics"]["computed_prompt_tokens"])
        info = await settled_info(session)
    return summarise(clients, seconds, computed, info)


def summarise(
    clients: Sequence[Client], seconds: list[float], computed: list[int], info: dict[str, Any]
) -> dict[str, Any]:
    """One row; `computed` is the server's counter before the first and after every turn."""
    ttft = [value for client in clients for value in client.ttft]
    prompt_tokens = sum(sum(client.prompt_tokens) for client in clients)
    output_tokens = sum(sum(client.output_tokens) for client in clients)
    cache = info["cache"]
    cached_positions = cache["pages_used"] * info["page_size"]
    ratio = cache["compression_vs_bf16"]
    return {
        "total_s": sum(seconds),
        "turn_s": seconds,
        "output_tok_s": output_tokens / sum(seconds),
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p95_s": float(np.quantile(ttft, 0.95)),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cached_share": sum(sum(client.cached_tokens) for client in clients) / prompt_tokens,
        "computed_tokens": computed[-1] - computed[0],
        "computed_first_turn": computed[1] - computed[0],
        "prompt_tokens_first_turn": [client.prompt_tokens[0] for client in clients],
        "preemptions": sum(client.preemptions for client in clients),
        "kv_bytes": cache["bytes_used"],
        "kv_bytes_per_token": cache["bytes_used"] / cached_positions if cached_positions else None,
        "vs_16bit": None if ratio is None else 1 / ratio,
        "kv_by_kind": {
            name: {key: kind[key] for key in ("pages_used", "bytes_used", "bits_per_value")}
            for name, kind in cache["kinds"].items()
        },
        "compute_dtype": info["dtype"],
    }


def make_claims(rows: Sequence[dict[str, Any]], system_tokens: int) -> list[Claim]:
    """What prefix sharing should give, profile by profile."""
    claims = []
    by_case = {(row["profile"], row["cache"]): row for row in rows}
    for (profile, cache), row in by_case.items():
        if cache == "off":
            continue
        share = row["cached_share"]
        claims.append(Claim.at_least(f"{profile}: cached share of prompt tokens", share, 0.9, ""))
        first = row["prompt_tokens_first_turn"]
        limit = system_tokens + sum(count - system_tokens + 64 for count in first)
        name = f"{profile}: prompt tokens computed in the first turn (system prompt once)"
        claims.append(Claim.at_most(name, row["computed_first_turn"], limit, "tokens"))
        time_ratio = row["total_s"] / by_case[profile, "off"]["total_s"]
        claims.append(
            Claim.at_most(f"{profile}: total time, cache on / off", time_ratio, 0.33, "x")
        )
    minima = by_case.get(("minima", "on"))
    if minima is not None:
        name = "minima: KV bytes per cached token against BF16 at 16 bits"
        claims.append(Claim.at_most(name, minima["vs_16bit"], 0.30, "x"))
    return claims


def plot(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    labels = [f"{row['profile']}\n{row['cache']}" for row in rows]
    at = np.arange(len(rows))
    colors = ["tab:blue" if row["cache"] == "on" else "tab:gray" for row in rows]
    bars = axes[0].bar(at, [row["total_s"] for row in rows], color=colors)
    axes[0].bar_label(bars, fmt="{:.0f}", padding=2)
    axes[0].set_ylabel("total time of all turns (s)")
    for offset, key in ((-0.2, "ttft_p50_s"), (0.2, "ttft_p95_s")):
        bars = axes[1].bar(at + offset, [row[key] for row in rows], 0.4, label=key[5:8])
        axes[1].bar_label(bars, fmt="{:.3g}", padding=2, fontsize=8)
    axes[1].set_yscale("log")
    axes[1].set_ylabel("time to first token (s, log scale)")
    axes[1].legend()
    axes[0].margins(y=0.1)
    axes[1].margins(y=0.2)
    for axis in axes[:2]:
        axis.set_xticks(at, labels)
        axis.set_xlabel("profile, prefix cache on / off")
    cached = [row for row in rows if row["vs_16bit"] is not None]
    bars = axes[2].bar(
        [row["profile"] for row in cached], [row["kv_bytes_per_token"] / 1024 for row in cached]
    )
    axes[2].bar_label(bars, fmt="{:.1f}", padding=2)
    if cached:
        price = cached[0]["kv_bytes_per_token"] / cached[0]["vs_16bit"] / 1024
        axes[2].axhline(price, color="black", linestyle="--", label="BF16 at 16 bits")
        axes[2].legend()
    axes[2].set_ylabel("KV per cached token (KiB)")
    axes[2].set_xlabel(f"profile, cache on (compute in {rows[0]['compute_dtype']})")
    figure.suptitle(title)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefix sharing: cache on/off, all profiles.")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens of every answer")
    parser.add_argument("--profiles", nargs="+", choices=PROFILES, default=list(PROFILES))
    options = parser.parse_args()
    record = Record("prefix_sharing")
    system = system_prompt(Tokenizer.load(resolve_model_path(None)), SYSTEM_TOKENS)
    rows = []
    for profile in options.profiles:
        for cache, flags in (("on", []), ("off", ["--disable-radix-cache"])):
            print(f"profile {profile}, cache {cache}", file=sys.stderr, flush=True)
            arguments = ["--kv-profile", profile, "--kv-cache-memory", KV_MEMORY, *flags]
            with running_server(arguments) as url:
                row = asyncio.run(converse(url, system, options))
            rows.append({"profile": profile, "cache": cache, **row})
    claims = make_claims(rows, SYSTEM_TOKENS)
    columns = {"profile": "", "cache": "", "total_s": ".1f", "output_tok_s": ".1f"}
    columns |= {"ttft_p50_s": ".2f", "ttft_p95_s": ".2f", "cached_share": ".1%"}
    columns |= {"computed_tokens": "d", "computed_first_turn": "d", "preemptions": "d"}
    columns |= {"kv_bytes": "d", "kv_bytes_per_token": ".0f", "vs_16bit": ".3f"}
    print(format_table(rows, columns))
    if "f32" in rows[-1]["kv_by_kind"]:
        print("profile bf16 stored float32 here; vs_16bit is against BF16 at 16 bits per value")
    print(format_claims(claims))
    title = f"{options.clients} clients x {options.turns} turns over a shared system prompt"
    record.write(rows, claims, plot(rows, f"{title} of {SYSTEM_TOKENS} tokens"))


if __name__ == "__main__":
    main()
