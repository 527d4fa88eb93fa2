"""Bodies of anything: never a 5xx, never a hang, and the server lives."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import aiohttp
import pytest
from random_grammars import random_grammar
from server_kit import RunningServer
from tiny_kit import assert_quiet

SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, -2, 7, 511, 512, 1 << 31, 1 << 63, -(1 << 63), 1 << 70),
    *(0.0, 0.5, 1.0, -0.5, 1e-9, 1e300, "", "a", "hello", "1", "\x00", "\ud83d\ude00 ü", "x" * 700),
    *([], {}, [None], [[]], [1], ["a"], [1, 2, 3], [1, "a"], [[1], [2, 3]], [True], [0.5]),
    *({"a": 1}, {"1": 1}, {"1": 200.0}, {"type": "text"}, [{}], [{"a": None}], {"x": {"y": []}}),
)
SAMPLING = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "stop_token_ids", "regex"),
    *("stop_regex", "ignore_eos", "skip_special_tokens", "no_stop_trim", "logit_bias", "heat"),
    *("sampling_seed", "stream_interval", "json_schema", "spaces_between_special_tokens"),
)
GENERATE = (
    *("text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len"),
    *("top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "stream", "priority"),
    *("extra_key", "cache_salt", "image_data", "lora_path", "session_params", "unknown"),
)
OPENAI = (
    *("model", "max_tokens", "n", "temperature", "top_p", "seed", "stop", "stream", "logit_bias"),
    *("stream_options", "frequency_penalty", "presence_penalty", "response_format", "top_k"),
    *("min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "stop_regex", "ignore_eos"),
    *("rid", "extra_key", "cache_salt", "priority", "logprobs", "user", "unknown"),
)
COMPLETION = (*OPENAI, "prompt", "echo", "best_of", "suffix")
CHAT = (
    *(*OPENAI, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"),
    *("continue_final_message", "chat_template_kwargs", "parallel_tool_calls", "input_ids"),
    *("reasoning_effort", "separate_reasoning"),
)
MESSAGES: tuple[Any, ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "assistant", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "system", "content": "s"}, {"role": "tool", "content": "t", "tool_call_id": 5}],
    [{"role": "user", "content": "hi", "name": {"odd": []}}, {"role": "assistant", "content": "a"}],
    [{"role": [], "content": "hi"}],
)


GRAMMAR_BODIES = 160


def constrained_body(rng: random.Random, path: str) -> Any:
    """A sound body with a random constraint on the output, sometimes with two."""
    kind, value = random_grammar(rng)
    limit = rng.choice((1, 8, 60))
    constraints = {kind: value}
    if rng.random() < 0.05:
        constraints |= [random_grammar(rng)]
    if path == "/generate":
        sampling = {"max_new_tokens": limit, "sampling_seed": rng.randrange(99), **constraints}
        return {"text": "hello", "sampling_params": sampling, "stream": rng.random() < 0.3}
    if kind == "json_schema" and rng.random() < 0.5:
        format_ = {"type": kind, kind: {"name": "x", "schema": value, "strict": limit > 1}}
        constraints = {"response_format": format_}
    elif kind == "structural_tag" and isinstance(value, dict) and rng.random() < 0.5:
        constraints = {"response_format": value}
    elif kind == "json_schema" and rng.random() < 0.5:
        function = {"name": "f", "parameters": value}
        tools = [{"type": "function", "function": function}]
        constraints = {"tools": tools, "tool_choice": rng.choice(("required", "auto"))}
    messages = [{"role": "user", "content": "hi"}]
    return {"messages": messages, "max_tokens": limit, "seed": rng.randrange(99), **constraints}


ANTHROPIC = (
    *("model", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control"),
    *("stop_sequences", "stream", "temperature", "top_p", "top_k", "messages", "max_tokens"),
)


def random_body(rng: random.Random, path: str) -> Any:
    """A sound body with some keys replaced by anything; sometimes not even an object."""
    if rng.random() < 0.02:
        return rng.choice(SCALARS)

    def scatter(body: dict[str, Any], keys: tuple[str, ...], most: int) -> dict[str, Any]:
        chosen = rng.sample(keys, rng.randrange(most))
        return body | {key: rng.choice(SCALARS) for key in chosen}

    if path == "/generate":
        sampling = scatter({"max_new_tokens": 3}, SAMPLING, 3)
        return scatter({"text": "hello", "sampling_params": sampling}, GENERATE, 4)
    if path == "/v1/completions":
        return scatter({"prompt": "hello", "max_tokens": 3}, COMPLETION, 4)
    if path == "/v1/messages":
        return scatter({"messages": rng.choice(MESSAGES), "max_tokens": 3}, ANTHROPIC, 4)
    return scatter({"messages": rng.choice(MESSAGES), "max_tokens": 3}, CHAT, 4)


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"]
)
def test_random_bodies_never_break_the_server(tiny: RunningServer, path: str) -> None:
    rng = random.Random(path)
    statuses = flood(tiny, path, [random_body(rng, path) for _ in range(150)])
    assert statuses[200] > 5
    assert statuses[400] > 5


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_random_grammars_never_break_the_server(tiny: RunningServer, path: str) -> None:
    pytest.importorskip("xgrammar", reason="structured output is not installed")
    rng = random.Random("grammars of " + path)
    bodies = [constrained_body(rng, path) for _ in range(GRAMMAR_BODIES)]
    statuses = flood(tiny, path, bodies)
    assert statuses[200] > GRAMMAR_BODIES // 5
    assert statuses[400] > GRAMMAR_BODIES // 10


def flood(tiny: RunningServer, path: str, bodies: list[Any]) -> Counter[int]:
    """Sends all of them, sixteen at a time, and looks at the answers and at the server behind
    them; returns how often each status came."""
    statuses: Counter[int] = Counter()

    async def send() -> None:
        room = asyncio.Semaphore(16)
        patience = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=patience) as session:

            async def one(body: Any) -> None:
                async with room, session.post(tiny.url + path, json=body) as reply:
                    text = await reply.text()
                statuses[reply.status] += 1
                assert reply.status < 500, (body, text)
                if reply.content_type == "text/event-stream":
                    ending = "message_stop" if path == "/v1/messages" else "data: [DONE]\n\n"
                    assert ending in text[-40:], (body, text)
                    assert '"code":5' not in text, (body, text)
                else:
                    json.loads(text)

            await asyncio.gather(*map(one, bodies))

    asyncio.run(send())
    assert tiny.generate({"text": "alive", "sampling_params": {"max_new_tokens": 1}}).ok
    assert_quiet(tiny)
    return statuses
