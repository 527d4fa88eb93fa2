"""The minima profile: what is cached, in which kind, and what every byte is."""

from __future__ import annotations

import numpy as np
import pytest
from engine_kit import EngineKit, make_args

from sglang_minima.cache.accounting import report
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.tokenization.tokenizer import Tokenizer

PAGE = 64


def test_ten_turn_conversation(embedded_runner: ModelRunner, tokenizer: Tokenizer) -> None:
    kit = EngineKit(
        make_args(max_total_tokens=8192, recent_window=128, anchor_tokens=64),
        embedded_runner,
        tokenizer,
    )
    messages = [{"role": "system", "content": "You answer briefly. " * 20}]
    before: list[int] = []
    for turn in range(10):
        messages.append(
            {"role": "user", "content": f"Question {turn}: name a colour, and say why."}
        )
        prompt = tokenizer.apply_chat_template(messages)
        # All of the last sequence but its last token has KV; whole pages of it are in the tree.
        shared = 0
        for a, b in zip(before[:-1], prompt, strict=False):
            if a != b:
                break
            shared += 1
        rid = kit.submit(prompt, max_new_tokens=10)
        kit.drain()
        assert kit.last(rid).cached_tokens >= shared // PAGE * PAGE, f"turn {turn}"
        if turn:
            assert shared > len(before) // 2
        answer = kit.tokens(rid)
        before = prompt + answer
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
    kit.settle()
    kit.check_idle()
    # Pages older than the window are TQ3, anchors and the window FP8.
    assert kit.cache.tree is not None
    namespace = next(iter({node.namespace for node in kit.cache.tree.walk()}))
    match = kit.cache.tree.match(namespace, before)
    kinds = [kit.cache.pool.kind_of(page) for page in match.pages]
    assert kinds[0] == "fp8"
    old = (len(before) - 1 - 128) // PAGE
    assert old > 2
    assert kinds[1:old] == ["tq3"] * (old - 1)
    assert kinds[-1] == "fp8"
    # Bytes: counted pages times the formats' formula, to the byte, and the parts fill the arena.
    facts = report(kit.cache)
    layers, heads, dim = 30, 3, 64
    fp8 = layers * heads * 2 * (PAGE * dim + PAGE * 2)
    tq3 = layers * heads * (2 * (PAGE * dim * 3 // 8 + PAGE * 2) + dim * 2)
    assert facts["kinds"]["fp8"]["page_bytes"] == fp8 == 760_320
    assert facts["kinds"]["tq3"]["page_bytes"] == tq3 == 311_040
    total = facts["free_slab_bytes"] + facts["unassigned_bytes"]
    for name, size in (("fp8", fp8), ("tq3", tq3)):
        kind = facts["kinds"][name]
        assert kind["bytes_used"] == kind["pages_used"] * size
        total += kind["bytes_used"] + kind["bytes_free"] + kind["bytes_slab_waste"]
    assert total == facts["arena_bytes"]
    assert facts["tiers"]["stale"]["pages"] == facts["kinds"]["tq3"]["pages_used"]
    assert sum(tier["bytes"] for tier in facts["tiers"].values()) == facts["bytes_used"]


def test_sixteen_clients_share_a_system_prompt(tiny_runner: ModelRunner) -> None:
    """Twins arrive together; the shared 1,500 tokens run through the model once."""
    kit = EngineKit(make_args(max_total_tokens=32768, max_running_requests=16), tiny_runner)
    rng = np.random.default_rng(0)
    system = rng.integers(3, 512, 1500).tolist()
    histories = [system + rng.integers(3, 512, 12).tolist() for _ in range(16)]
    computed = []
    for _ in range(4):
        start = kit.scheduler.statistics.computed_tokens
        rids = [kit.submit(ids, max_new_tokens=4, ignore_eos=True) for ids in histories]
        kit.drain()
        computed.append(kit.scheduler.statistics.computed_tokens - start)
        histories = [
            ids + kit.tokens(rid) + rng.integers(3, 512, 12).tolist()
            for ids, rid in zip(histories, rids, strict=True)
        ]
    # First turn: the shared prompt once; each client its question and at most the page around it.
    assert computed[0] <= 1500 + 16 * (PAGE + 12)
    # Later turns: only what is new, and at most the open page before it.
    assert max(computed[1:]) <= 16 * (PAGE + 4 + 12)
    kit.check_idle()


@pytest.mark.parametrize("stale", ["tq(16,4)", "tq(5,3)"])
def test_other_stale_formats(embedded_runner: ModelRunner, stale: str) -> None:
    """Any level counts run end to end, boundary layers kept in FP8."""
    kit = EngineKit(
        make_args(
            max_total_tokens=4096,
            stale_format=stale,
            stale_fp8_layers="0,-1",
            recent_window=0,
            anchor_tokens=0,
        ),
        embedded_runner,
    )
    prompt = list(range(1000, 1300))
    first = kit.submit(prompt, max_new_tokens=4, ignore_eos=True)
    kit.drain()
    kit.settle()
    again = kit.submit(prompt, max_new_tokens=4, ignore_eos=True)
    kit.drain()
    assert kit.last(first).cached_tokens == 0
    assert kit.last(again).cached_by_tier == {f"{stale}+fp8[0,29]": 256}
    kit.check_idle()
