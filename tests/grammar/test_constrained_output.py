"""What a random model writes under a grammar follows it, in any company and through preemptions."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from typing import Any

import jsonschema
import pytest
import torch
import xgrammar
from grammar_kit import GrammarKit
from schemas import object_schema, random_schema

from sglang_minima.grammar import constraint as constraints
from sglang_minima.grammar.compiler import MAX_SPACE, GrammarCompiler, vocabulary
from sglang_minima.grammar.failed import AMBIGUOUS
from sglang_minima.grammar.spec import Grammar

SCHEMAS = 100


def regex(pattern: str) -> Grammar:
    return Grammar.make("regex", pattern)


def ebnf(text: str) -> Grammar:
    return Grammar.make("ebnf", text)


def test_json_always_parses_and_validates(kit: GrammarKit) -> None:
    rng = random.Random(20)
    schemas = [object_schema(rng) if n % 2 else random_schema(rng) for n in range(SCHEMAS)]
    rids = [
        kit.ask(Grammar.json_schema(schema), f"{n}:", sampling_seed=n, max_new_tokens=480)
        for n, schema in enumerate(schemas)
    ]
    kit.drain()
    ended = 0
    for schema, rid in zip(schemas, rids, strict=True):
        text, finish = kit.text(rid), kit.finish(rid)
        assert finish.type in ("stop", "length"), (finish, schema)
        if finish.type == "stop":
            ended += 1
            jsonschema.validate(json.loads(text), schema)
    # A random model does not always close its white space and digits in time.
    assert ended >= 0.95 * SCHEMAS
    kit.check_idle()


FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
TAGGED = {"format": {"type": "json_schema", "json_schema": FLAG}}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema(FLAG),
        Grammar.json_schema(FLAG, strict=False),
        Grammar.structural_tag(TAGGED),
    ],
    ids=["strict", "open", "tag"],
)
def test_white_space_has_a_bound(kit: GrammarKit, grammar: Grammar) -> None:
    """A model that writes blanks wherever it may still comes to the end of its object."""
    assert kit.tokenizer is not None
    blanks = [kit.tokenizer.encode(blank)[0] for blank in " \n\t"]
    likely = dict.fromkeys(blanks, 50.0) | {kit.tokenizer.encode("}")[0]: 20.0}
    rid = kit.ask(grammar, logit_bias=likely, sampling_seed=2)
    kit.drain()
    assert kit.finish(rid).type == "stop"
    assert json.loads(kit.text(rid))["on"] in (True, False)
    runs = [len(run) for run in re.findall(r"[ \n\t]+", kit.text(rid))]
    assert runs and max(runs) == MAX_SPACE


def test_white_space_within_the_bound_is_free(kit: GrammarKit) -> None:
    """Deep indentation, compact text and odd spacing all follow a schema."""
    value: Any = {"on": True}
    schema: Any = FLAG
    for _ in range(6):
        value = {"in": value}
        schema = {"type": "object", "properties": {"in": schema}, "required": ["in"]}
    assert kit.tokenizer is not None
    info = vocabulary(kit.tokenizer, kit.tokenizer.eos_token_ids)
    compiled = GrammarCompiler(info).compile(Grammar.json_schema(schema))
    for text in (
        json.dumps(value, indent=4),
        json.dumps(value, separators=(",", ":")),
        json.dumps(value).replace(":", "\t: \n"),
    ):
        matcher = xgrammar.GrammarMatcher(compiled)
        assert matcher.accept_string(text) and matcher.is_completed(), text
    assert not xgrammar.GrammarMatcher(compiled).accept_string("{" + " " * (MAX_SPACE + 1))


@pytest.mark.parametrize(
    "pattern",
    [
        "[0-9]{3}-[0-9]{4}",
        "(yes|no|may be)",
        "a?b+c*d",
        r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
        r"\"[\w\d]{0,12}\"",
        "(ab){2,5}|[^a]{3}",
        "[äöü]{2}€",
        "x{0,40}y",
        r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    ],
)
def test_regex_matches_in_full(kit: GrammarKit, pattern: str) -> None:
    rids = [kit.ask(regex(pattern), sampling_seed=seed) for seed in range(6)]
    kit.drain()
    for rid in rids:
        assert kit.finish(rid).type == "stop"
        assert re.fullmatch(pattern, kit.text(rid), re.ASCII), kit.text(rid)


def test_ebnf_with_recursion(kit: GrammarKit) -> None:
    grammar = ebnf('root ::= "(" root ")" | "[" root "]" | "x"')
    rids = [kit.ask(grammar, sampling_seed=seed) for seed in range(12)]
    kit.drain()
    for rid in rids:
        text = kit.text(rid)
        while "(x)" in text or "[x]" in text:
            text = text.replace("(x)", "x").replace("[x]", "x")
        assert text == "x" and kit.finish(rid).type == "stop"


def test_special_tokens_are_no_text(kit: GrammarKit) -> None:
    assert kit.tokenizer is not None
    # The pattern asks for the letters of a special token; only ordinary tokens may spell them.
    start = next(iter(kit.tokenizer.special_ids - kit.tokenizer.eos_token_ids))
    rid = kit.ask(regex(re.escape("<|im_start|>")), logit_bias={start: 100.0})
    kit.drain()
    assert kit.text(rid) == "<|im_start|>"
    assert start not in kit.tokens(rid)


def test_free_requests_keep_their_tokens(kit: GrammarKit) -> None:
    prompts = [f"Free text number {n}" for n in range(6)]
    alone = [kit.ask(None, prompt, temperature=0.0, max_new_tokens=40) for prompt in prompts]
    kit.drain()
    kit.cache.flush()
    mixed = []
    for n, prompt in enumerate(prompts):
        mixed.append(kit.ask(None, prompt, temperature=0.0, max_new_tokens=40))
        kit.ask(regex("[a-c]{60}"), f"Bound {n}", temperature=0.0)
        kit.ask(Grammar.json_object(), f"Object {n}", max_new_tokens=40)
    kit.drain()
    assert [kit.tokens(rid) for rid in mixed] == [kit.tokens(rid) for rid in alone]


def test_preemption_keeps_the_place_in_the_grammar(runner: Any, byte_model: Any) -> None:
    def texts(tokens: int) -> tuple[list[str], int]:
        kit = GrammarKit.start(
            runner, byte_model, max_total_tokens=tokens, disable_radix_cache=True
        )
        grammar = ebnf('root ::= ("<" [a-z]{3} ">"){20} "."')
        rids = [kit.ask(grammar, f"Prompt {n}", sampling_seed=n) for n in range(6)]
        kit.drain()
        kit.check_idle()
        return [kit.text(rid) for rid in rids], kit.scheduler.statistics.preemptions

    roomy, none = texts(4096)
    tight, some = texts(256)
    assert none == 0 and some > 0
    for text in (*roomy, *tight):
        assert re.fullmatch(r"(<[a-z]{3}>){20}\.", text)


def test_samples_are_seeded(kit: GrammarKit) -> None:
    rids = [kit.ask(regex("[a-z]{12}"), sampling_seed=seed) for seed in (1, 2, 1)]
    kit.drain()
    first, second, third = (kit.text(rid) for rid in rids)
    assert first == third != second


def test_min_new_tokens_and_ignore_eos_go_on_while_the_grammar_can(kit: GrammarKit) -> None:
    assert kit.tokenizer is not None
    eos = next(iter(kit.tokenizer.eos_token_ids))
    keen = {"logit_bias": {eos: 100.0}}  # ends as soon as it may
    plain = kit.ask(regex("[ab]+"), **keen)
    least = kit.ask(regex("[ab]+"), min_new_tokens=9, **keen)
    endless = kit.ask(regex("[ab]+"), ignore_eos=True, max_new_tokens=20, **keen)
    closed = kit.ask(regex("[ab]{5}"), min_new_tokens=9)
    closed_too = kit.ask(regex("[ab]{5}"), ignore_eos=True)
    kit.drain()
    assert [len(kit.text(rid)) for rid in (plain, least, endless)] == [1, 9, 20]
    assert kit.finish(endless).type == "length"
    for rid in (closed, closed_too):
        assert len(kit.text(rid)) == 5
        assert (kit.finish(rid).type, kit.finish(rid).matched) == ("stop", eos)


def test_stops_penalties_and_bias_work_with_a_grammar(kit: GrammarKit) -> None:
    assert kit.tokenizer is not None
    letter = kit.tokenizer.encode("b")[0]
    stopped = kit.ask(regex("[ab]{40}"), stop=["bb"], logit_bias={letter: 100.0})
    by_token = kit.ask(regex("[ab]{40}"), stop_token_ids=[letter])
    biased = kit.ask(regex("[ab]{40}"), logit_bias={letter: 100.0})
    varied = kit.ask(regex("[ab]{40}"), frequency_penalty=2.0, temperature=0.0)
    unlikely = kit.ask(regex("a{6}"), logit_bias={kit.tokenizer.encode("a")[0]: -100.0})
    kit.drain()
    assert kit.text(stopped).endswith("bb") and kit.finish(stopped).matched == "bb"
    assert kit.text(by_token).count("b") == 1 and kit.finish(by_token).matched == letter
    assert kit.text(biased) == "b" * 40
    assert abs(kit.text(varied).count("a") - 20) <= 2
    assert kit.text(unlikely) == "aaaaaa"


def test_log_probabilities_are_the_models_own(kit: GrammarKit) -> None:
    asked = {"return_logprob": True, "top_logprobs_num": 3}
    rid = kit.ask(regex("[xyz]{8}"), message=asked)
    kit.drain()
    outputs = [output.output_logprobs for output in kit.outputs[rid] if output.output_logprobs]
    values = [value for logprobs in outputs for value, _ in logprobs.tokens]
    assert len(values) == len(kit.tokens(rid)) == 9
    # Three letters of 258 tokens: were the mask in the distribution, they would be near -1.
    assert max(values[:8]) < -2.5


def test_a_grammar_without_a_way_out_ends_the_request(kit: GrammarKit) -> None:
    rid = kit.ask(ebnf('root ::= "ab" dead\ndead ::= dead'))
    free = kit.ask(None, max_new_tokens=30, ignore_eos=True)
    kit.drain()
    finish = kit.finish(rid)
    assert (finish.type, finish.status_code) == ("abort", 400)
    assert "no continuation" in finish.message
    assert kit.finish(free).type == "length"
    kit.check_idle()


def test_a_grammar_that_gets_too_slow_ends_its_request(
    kit: GrammarKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "SLOW_SECONDS", 1e-9)
    rid = kit.ask(regex("[a-z]{20}"))
    kit.drain()
    assert kit.finish(rid).status_code == 400 and "ambiguous" in kit.finish(rid).message


def test_an_ambiguous_grammar_has_a_budget(kit: GrammarKit) -> None:
    """Every token takes a little longer than the one before, and never very long: together they
    would hold up all others for many seconds."""
    grammar = ebnf(
        "root ::= (r0 ([^x] root | root)*)* | r0 r0\n"
        'r0 ::= [^x] r1 r0 | r0 "" | (r0 [^x])* r0 | [^x]\n'
        'r1 ::= ([^x] [^x] | r1 root)+ | [a-z]* "\u00e9"?'
    )
    rid = kit.ask(grammar, max_new_tokens=480, ignore_eos=True)
    free = kit.ask(None, max_new_tokens=30, ignore_eos=True)
    started = time.process_time()
    kit.drain()
    assert time.process_time() - started < 10
    assert kit.finish(rid).status_code == 400 and "ambiguous" in kit.finish(rid).message
    assert kit.finish(free).type == "length"


def test_an_abort_while_the_grammar_is_compiled(kit: GrammarKit) -> None:
    rid = kit.ask(regex("[a-f]{9}"))
    kit.scheduler.abort(rid)
    assert kit.finish(rid).type == "abort"
    assert not kit.scheduler.waiting
    kit.check_idle()


def test_compiled_grammars_are_kept_within_bounds(
    kit: GrammarKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_minima.grammar import loader

    monkeypatch.setattr(loader, "MAX_ENTRIES", 3)
    rids = [kit.ask(regex(f"[a-z]{{{n}}}")) for n in range(1, 9)]
    kit.drain()
    assert [len(kit.text(rid)) for rid in rids] == list(range(1, 9))
    assert len(kit.loader._compiled) == 3
    assert kit.loader._bytes == sum(g.memory_size_bytes for g in kit.loader._compiled.values())


def test_masks_touch_their_rows_only() -> None:
    from sglang_minima.runner.token_masks import apply_masks, forbid

    logits = torch.randn(4, 70)
    before = logits.clone()
    words = torch.full((2, 3), -1, dtype=torch.int32)
    forbid(words[0], [0, 31, 32, 69])
    words[1] = 0
    words[1, 2] = 1 << 4  # token 68
    apply_masks(logits, [1, 3], words)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert torch.isinf(logits[1]).nonzero().flatten().tolist() == [0, 31, 32, 69]
    assert torch.isfinite(logits[3]).nonzero().flatten().tolist() == [68]


DASHES = 'root ::= [a-y] [a-y]* | "z" amb\namb ::= amb amb | amb amb amb | "-"'


def test_a_grammar_that_failed_is_not_followed_again(
    kit: GrammarKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "SPARE_SECONDS", 0.02)
    assert kit.tokenizer is not None
    likely = {kit.tokenizer.encode(character)[0]: 100.0 for character in "z-"}
    grammar = ebnf(DASHES)
    rids = [kit.ask(grammar, logit_bias=likely) for _ in range(16)]
    kit.drain()
    for rid in rids:
        assert (kit.finish(rid).status_code, kit.finish(rid).message) == (400, AMBIGUOUS)
    assert grammar in kit.loader._failed
    started = time.process_time()
    again = kit.ask(grammar, logit_bias=likely)
    kit.drain()
    assert time.process_time() - started < 1
    assert (kit.finish(again).status_code, kit.tokens(again)) == (400, [])
    kit.check_idle()


def test_those_that_run_end_without_the_matcher(kit: GrammarKit) -> None:
    grammar = regex("[a-z]{99}")
    rid = kit.ask(grammar)
    while not kit.scheduler.running:
        kit.step()
    kit.step()
    kit.loader._failed.add(grammar)
    before = len(kit.tokens(rid)) if rid in kit.outputs else 0
    kit.drain()
    assert kit.finish(rid).message == AMBIGUOUS
    assert len(kit.tokens(rid)) <= before + 2
    kit.check_idle()


def test_slow_sequences_take_turns(kit: GrammarKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "SECONDS_A_TOKEN", 0.0)  # all of them are slow
    rids = [kit.ask(regex("[a-z]{8}"), f"{n}") for n in range(3)]
    free = kit.ask(None, max_new_tokens=6, ignore_eos=True)
    steps = 0
    while kit.scheduler.running or kit.scheduler.waiting:
        kit.step()
        steps += kit.scheduler.running > 0
    assert steps >= 3 * 7
    assert all(re.fullmatch("[a-z]{8}", kit.text(rid)) for rid in rids)
    assert len(kit.tokens(free)) == 6


def settle(kit: GrammarKit) -> None:
    end = time.monotonic() + 20
    while kit.loader._loading and time.monotonic() < end:
        time.sleep(0.002)
        kit.step()
    assert not kit.loader._loading


def test_grammars_of_aborted_requests_are_counted_or_never_compiled(
    kit: GrammarKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    compile_one = kit.loader._load

    def load(grammar: Grammar) -> Any:
        begun.set()
        assert go.wait(20)
        return compile_one(grammar)

    monkeypatch.setattr(kit.loader, "_load", load)
    first, second, shared = regex("one{3}"), regex("two{3}"), regex("three{3}")
    rids = [kit.ask(grammar) for grammar in (first, second, shared)]
    other = kit.ask(shared)
    kit.step()
    assert begun.wait(20)
    for rid in rids:
        kit.scheduler.abort(rid)
    assert set(kit.loader._loading) == {first, shared}
    go.set()
    kit.drain()
    settle(kit)
    assert set(kit.loader._compiled) == {first, shared}
    assert kit.loader._bytes == sum(g.memory_size_bytes for g in kit.loader._compiled.values())
    assert kit.text(other) == "threeeee"[:7]


@pytest.mark.parametrize("error", [MemoryError(), ImportError("no such library")])
def test_any_error_of_a_load_ends_its_request_only(
    kit: GrammarKit, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(grammar: Grammar) -> Any:
        raise error

    free = kit.ask(None, max_new_tokens=6, ignore_eos=True)
    with monkeypatch.context() as patched:
        patched.setattr(kit.loader, "_load", load)
        rid = kit.ask(regex("[a-c]{4}"))
        kit.drain()
    finish = kit.finish(rid)
    assert finish.status_code == 500 and type(error).__name__ in finish.message
    assert kit.finish(free).type == "length"
    later = kit.ask(regex("[a-c]{4}"))
    kit.drain()
    assert len(kit.text(later)) == 4


def test_a_dead_thread_ends_requests_with_grammars_only(kit: GrammarKit) -> None:
    kit.loader._thread.shutdown()
    rid, free = kit.ask(regex("a{4}")), kit.ask(None, max_new_tokens=6, ignore_eos=True)
    kit.drain()
    assert kit.finish(rid).status_code == 500
    assert kit.finish(free).type == "length"


def test_a_schema_without_a_finite_text_runs_into_its_limit(kit: GrammarKit) -> None:
    node = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    rid = kit.ask(Grammar.json_schema(node), max_new_tokens=60)
    kit.drain()
    assert kit.finish(rid).type == "length"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "http://x/y"}, "leads out"),
        ({"properties": {"default": {"$ref": "other.json#/a"}}}, "leads out"),
        ({"$ref": "#a"}, "leads out"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "Circular"),
        ({"$ref": "#/$defs/a"}, "Cannot find"),
        ({"properties": {"$ref": {"type": "string"}, "pattern": {"const": {"$ref": "x"}}}}, ""),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, ""),
    ],
)
def test_references(kit: GrammarKit, schema: Any, said: str) -> None:
    rid = kit.ask(Grammar.json_schema(schema), max_new_tokens=4)
    tagged = {"format": {"type": "json_schema", "json_schema": schema}}
    inside = kit.ask(Grammar.structural_tag(tagged), max_new_tokens=4)
    kit.drain()
    for finish in (kit.finish(rid), kit.finish(inside)):
        if said:
            assert finish.status_code == 400 and said in finish.message
        else:
            assert finish.type in ("stop", "length")
