"""What the dashboard is told of the cache: true, in bounded work a step, and without any trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import EngineKit, make_args
from hypothesis import given, settings
from hypothesis import strategies as st

import sglang_minima.cache.survey as survey_module
from minima_kernels import KVGeometry
from minima_radix import Namespace, RadixTree, TreeWalk, check
from sglang_minima.cache.accounting import report
from sglang_minima.cache.arena import KVArena
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.cache.profile import build_profile
from sglang_minima.cache.survey import MAX_NODES_AT_ONCE, MIN_NODES, Surveys, describe_match
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.server_args import ServerArgs

PAGE = 8
MINIMA = Namespace(None, None, "minima")


def column(survey: dict[str, Any], name: str) -> list[int]:
    kind = {"id": "<i8", "idle": "<f4"}.get(name, "<i4")
    return list(np.frombuffer(survey[name], dtype=kind).tolist())


def take(surveys: Surveys) -> dict[str, Any]:
    surveys.ask("me")
    while True:
        for reply_to, survey in surveys.advance():
            assert reply_to == "me"
            return survey


def marks(tree: RadixTree) -> list[tuple[Any, ...]]:
    """Everything that a look must not change."""
    return [
        (node.start, len(node.pages), node.hits, node.last_access, node.lock_count)
        for node in tree.walk()
    ]


def busy_kit(runner: ModelRunner, **settings: Any) -> EngineKit:
    """A cache with forks, two tenants and both kinds of pages."""
    kit = EngineKit(
        make_args(
            page_size=PAGE,
            max_total_tokens=2048,
            recent_window=16,
            anchor_tokens=PAGE,
            **settings,
        ),
        runner,
    )
    trunk = list(range(10, 10 + 6 * PAGE))
    for tail in range(3):
        kit.submit([*trunk, *[100 + tail] * 12], max_new_tokens=2, ignore_eos=True)
        kit.drain()
    salted = {"salt": "the-salt-of-a-tenant"}
    kit.submit(trunk[: 3 * PAGE], message=salted, max_new_tokens=1)
    kit.drain()
    kit.settle()
    return kit


def test_survey_tells_the_whole_tree(tiny_runner: ModelRunner) -> None:
    kit = busy_kit(tiny_runner)
    tree = kit.cache.tree
    assert tree is not None
    before = marks(tree)
    survey = take(Surveys(kit.cache))
    assert marks(tree) == before
    nodes = list(tree.walk())
    parents = column(survey, "parent")
    assert len(parents) == len(nodes) + 2  # and the roots of two namespaces
    assert parents[:2] == [-1, -1]
    assert sum(column(survey, "pages")) == tree.total_pages == survey["pages_in_tree"]
    assert sorted(column(survey, "hits")) == sorted([0, 0, *[node.hits for node in nodes]])
    assert survey["complete"]
    tiers = report(kit.cache)["tiers"]
    assert sum(column(survey, "stale")) == tiers["stale"]["pages"] > 0
    assert sum(column(survey, "anchor")) == tiers["anchor"]["pages"] > 0
    assert len(set(column(survey, "id"))) == len(parents)
    assert all(0 <= idle < 600 for idle in column(survey, "idle"))
    check(kit.cache.lifecycle)


def test_survey_names_no_tokens_and_no_salts(tiny_runner: ModelRunner) -> None:
    survey = take(Surveys(busy_kit(tiny_runner).cache))
    assert sorted(entry["name"] for entry in survey["namespaces"]) == [
        "default namespace",
        "tenant 2",
    ]
    assert "the-salt-of-a-tenant" not in str(survey)


def test_ids_stay_from_survey_to_survey(tiny_runner: ModelRunner) -> None:
    kit = busy_kit(tiny_runner)
    first = set(column(take(Surveys(kit.cache)), "id"))
    kit.generate([[300 + i for i in range(3 * PAGE)]], max_new_tokens=1)
    second = set(column(take(Surveys(kit.cache)), "id"))
    assert first < second
    assert len(second - first) == 1


def test_everybody_who_asks_gets_the_same_walk(tiny_runner: ModelRunner) -> None:
    surveys = Surveys(busy_kit(tiny_runner).cache)
    assert not surveys.active and surveys.advance() == []
    surveys.ask("a")
    surveys.ask("b")
    answers: list[tuple[str, dict[str, Any]]] = []
    while surveys.active:
        answers += surveys.advance()
    assert [name for name, _ in answers] == ["a", "b"]
    assert answers[0][1] is answers[1][1]


def test_without_a_tree_there_is_nothing_to_see(tiny_runner: ModelRunner) -> None:
    args = make_args(page_size=PAGE, disable_radix_cache=True, max_total_tokens=64)
    kit = EngineKit(args, tiny_runner)
    with pytest.raises(ValueError, match="shares no prefixes"):
        Surveys(kit.cache).ask("me")
    with pytest.raises(ValueError, match="shares no prefixes"):
        describe_match(kit.cache, MINIMA, [1, 2, 3])


def test_survey_of_50_000_nodes_is_cut_into_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps of the scheduler never more than a few hundred nodes are visited."""
    visits: list[int] = []

    class CountingWalk(TreeWalk):
        def advance(self, budget: int) -> Any:
            found = super().advance(budget)
            visits.append(len(found))
            return found

    monkeypatch.setattr(survey_module, "TreeWalk", CountingWalk)
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=16, page_size=4)
    args = ServerArgs(page_size=4)
    profile = build_profile(args, geometry, torch.float32)
    size = 50_100 * profile.recent.bytes_per_page(geometry)
    cache = PrefixCache(args, KVArena(torch.zeros(size, dtype=torch.uint8), geometry, profile))
    tree = cache.tree
    assert tree is not None
    for i in range(1, 50_000):
        tree.insert(MINIMA, None, [1, 1, 1, 1, 2, 3, 4, i], [0, i])
    survey = take(Surveys(cache))
    assert len(column(survey, "id")) == sum(visits) == 50_001
    assert max(visits) <= MIN_NODES
    assert len(visits) == -(-50_001 // MIN_NODES)
    # After a long step it may be more, in proportion, and never more than that:
    surveys = Surveys(cache)
    surveys.ask("me")
    for step_seconds, most in ((0.02, 100), (0.1, 500), (60.0, MAX_NODES_AT_ONCE)):
        surveys.advance(step_seconds)
        assert visits[-1] == most


def test_scraping_walks_over_no_node(
    tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = busy_kit(tiny_runner)

    def walk(self: RadixTree) -> Any:
        raise AssertionError("a scrape walked over the tree")

    monkeypatch.setattr(RadixTree, "walk", walk)
    assert report(kit.cache)["pages_in_tree"] > 0
    assert kit.scheduler.statistics.snapshot()["cached_tokens"] > 0


@settings(max_examples=25)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=6
    ),
    deterministic=st.booleans(),
)
def test_description_foretells_what_a_request_gets(
    tiny_runner: ModelRunner, prompts: list[tuple[int, int, int]], deterministic: bool
) -> None:
    kit = EngineKit(
        make_args(
            page_size=PAGE,
            max_total_tokens=2048,
            recent_window=16,
            anchor_tokens=PAGE,
            deterministic_cache=deterministic,
        ),
        tiny_runner,
    )
    tree = kit.cache.tree
    assert tree is not None
    for shared, own, branch in prompts:
        prompt = [*range(10, 10 + shared), *[200 + branch] * own]
        before = marks(tree)
        told = describe_match(kit.cache, MINIMA, prompt)
        assert marks(tree) == before
        rid = kit.submit(prompt, max_new_tokens=1)
        kit.drain()
        output = kit.last(rid)
        assert told["matched_tokens"] + told["copied_tokens"] == output.cached_tokens
        assert told["tokens"] == len(prompt)
        by_kind: dict[str, int] = {}
        for page in told["pages"]:
            by_kind[page["kind"]] = by_kind.get(page["kind"], 0) + PAGE
        whole = sum(output.cached_by_tier.values()) - told["copied_tokens"]
        assert sum(by_kind.values()) == whole
        assert all((page["tier"] == "stale") == (page["kind"] == "tq3") for page in told["pages"])
        assert [page["node"] for page in told["pages"]] == sorted(
            page["node"] for page in told["pages"]
        )
        kit.settle()


def test_path_of_a_prompt_is_found_in_the_survey(tiny_runner: ModelRunner) -> None:
    kit = busy_kit(tiny_runner)
    told = describe_match(kit.cache, MINIMA, [*range(10, 10 + 6 * PAGE), *[101] * 12])
    survey = take(Surveys(kit.cache))
    ids = [f"{value & 0xFFFFFFFFFFFFFFFF:016x}" for value in column(survey, "id")]
    places = [ids.index(name) for name in told["path"]]
    assert len(places) >= 3
    assert [column(survey, "parent")[place] for place in places] == [-1, *places[:-1]]
    assert told["pages"][0]["tier"] == "anchor"
    assert told["pages"][0]["hits"] >= 2
