"""Programs of the real frontend client: turns, forks, batches, streams, choices.

Each test says at its start something no other does, so that what it finds in the cache is its own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from server_kit import RunningServer

sgl = pytest.importorskip("sglang", reason="the sglang frontend client is not installed")

FACTS = (
    "The lighthouse stands on a rock of basalt, four miles from the harbour. It was built in "
    "eighteen hundred and ninety by two brothers, burns for the whole night, and is painted with "
    "white and red stripes. Three keepers live there with a dog, a small library and a radio, and "
    "a boat brings bread, oil and letters to them once a week when the sea allows it. "
)


@pytest.fixture(scope="module")
def backend(server: RunningServer) -> Any:
    return sgl.RuntimeEndpoint(server.url)


@pytest.fixture(scope="module")
def page(server: RunningServer) -> int:
    return int(server.get("/server_info").json()["page_size"])


def test_endpoint_reads_the_server(backend: Any, server: RunningServer) -> None:
    assert "SmolLM2" in backend.get_model_name()
    assert backend.get_server_info()["page_size"] == server.get("/server_info").json()["page_size"]
    assert backend.chat_template is not None


def test_turns_of_a_chat_reuse_the_answers(backend: Any, page: int) -> None:
    @sgl.function
    def chat(s: Any, questions: list[str]) -> None:
        s += sgl.system("Chat. " + FACTS)
        for index, question in enumerate(questions):
            s += sgl.user(question)
            s += sgl.assistant(sgl.gen(f"answer{index}", max_tokens=8, ignore_eos=True))

    questions = ["Who built it?", "What do the keepers have?", "When does it burn?"]
    state = chat.run(questions, temperature=0, backend=backend)
    metas = [state.get_meta_info(f"answer{index}") for index in range(3)]
    for index, (before, now) in enumerate(pairwise(metas)):
        assert state[f"answer{index}"]
        known = before["prompt_tokens"] + before["completion_tokens"]
        # The last token of an answer, and a token that joins two turns, may be new.
        assert now["cached_tokens"] >= (known - 2) // page * page > 0


@pytest.mark.parametrize("parent", ["generates", "is cold"])
def test_fork_generates_from_sealed_pages(
    backend: Any, page: int, server: RunningServer, parent: str
) -> None:
    @sgl.function
    def tips(s: Any) -> None:
        s += f"The parent {parent}. " + FACTS + "Here are three tips for keepers."
        if parent == "generates":
            s += sgl.gen("start", max_tokens=2, ignore_eos=True)
        children = s.fork(3)
        for index, child in enumerate(children):
            child += f"\nTip {index + 1}:" + sgl.gen("tip", max_tokens=6, ignore_eos=True)
        children.join()
        s += "\nTip 1:" + s["tip"][0] + "\nIn short:"
        s += sgl.gen("summary", max_tokens=4, ignore_eos=True)
        s["metas"] = [child.get_meta_info("tip") for child in children]

    before = server.get("/server_info").json()["statistics"]["computed_prompt_tokens"]
    state = tips.run(temperature=0, backend=backend)
    after = server.get("/server_info").json()["statistics"]["computed_prompt_tokens"]
    metas = [*state["metas"], state.get_meta_info("summary")]
    assert len(state["tip"]) == 3 and all(state["tip"]) and state["summary"]
    shared = metas[0]["prompt_tokens"] // page * page
    assert shared > 0
    # Of children that arrive together before anything is cached, one computes for the others.
    computing = [meta for meta in metas if meta["cached_tokens"] < shared]
    assert len(computing) <= (0 if parent == "generates" else 1)
    for meta in metas:
        assert sum(meta["cached_tokens_by_tier"].values()) == meta["cached_tokens"]
    # The prefix ran through the model once: each call adds its own lines and an open page at most.
    assert after - before < metas[0]["prompt_tokens"] + 5 * (page + 24)


def test_batch_computes_the_common_prefix_once(
    backend: Any, page: int, server: RunningServer
) -> None:
    @sgl.function
    def answer(s: Any, question: str) -> None:
        s += "Batch. " + FACTS + "Question: "
        s += question + "\nAnswer:"
        s += sgl.gen("answer", max_tokens=4, stop=["\n", "Question"])

    questions = ["Who lives there?", "What is the rock?", "Who built it?", "Is there a dog?"]
    before = server.get("/server_info").json()["statistics"]["computed_prompt_tokens"]
    states = answer.run_batch([{"question": q} for q in questions], temperature=0, backend=backend)
    after = server.get("/server_info").json()["statistics"]["computed_prompt_tokens"]
    metas = [state.get_meta_info("answer") for state in states]
    for state, question, meta in zip(states, questions, metas, strict=True):
        assert question in state.text()
        assert "\n" not in state["answer"] and "Question" not in state["answer"]
        assert meta["cached_tokens"] >= page
    assert after - before < metas[0]["prompt_tokens"] + len(questions) * (page + 24)


def test_stream_equals_the_final_text(backend: Any) -> None:
    @sgl.function
    def story(s: Any) -> None:
        s += "Once upon a time"
        s += sgl.gen("story", max_tokens=12, ignore_eos=True)

    whole = story.run(temperature=0, backend=backend)
    state = story.run(temperature=0, backend=backend, stream=True)
    pieces = list(state.text_iter("story"))
    assert len(pieces) > 2
    assert "".join(pieces) == state["story"] == whole["story"]
    assert state.get_meta_info("story")["completion_tokens"] == 12


def test_limits_and_stops(backend: Any) -> None:
    @sgl.function
    def count(s: Any, stop: Any) -> None:
        s += "Count: one, two, three, four,"
        s += sgl.gen("rest", max_tokens=12, ignore_eos=True, stop=stop)

    free = count.run([], temperature=0, backend=backend)
    meta = free.get_meta_info("rest")
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["completion_tokens"] == 12
    words = free["rest"].split()
    stop = words[2]
    cut = count.run(["@@@", stop], temperature=0, backend=backend)
    assert cut["rest"] == free["rest"][: free["rest"].index(stop)]
    assert cut.get_meta_info("rest")["finish_reason"] == {"type": "stop", "matched": stop}


def test_max_new_tokens_of_the_run(backend: Any) -> None:
    @sgl.function
    def go_on(s: Any) -> None:
        s += "The sea" + sgl.gen("text")

    state = go_on.run(max_new_tokens=3, ignore_eos=True, temperature=0, backend=backend)
    assert state.get_meta_info("text")["completion_tokens"] == 3


@pytest.mark.parametrize(
    "method",
    ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"],
)
def test_choices(backend: Any, method: str) -> None:
    @sgl.function
    def capital(s: Any) -> None:
        s += "The capital of France is the city of"
        s += sgl.gen(
            "city",
            choices=[" Paris", " London", " cheese"],
            choices_method=getattr(sgl, method),
        )

    state = capital.run(temperature=0, backend=backend)
    assert state["city"] == " Paris"
    meta = state.get_meta_info("city")
    assert [row[-1][2] for row in meta["input_token_logprobs"]] == [" Paris", " London", " cheese"]
    assert all(entry[0] < 0 for row in meta["input_token_logprobs"] for entry in row)


def test_select_after_text_of_the_model(backend: Any) -> None:
    @sgl.function
    def judge(s: Any) -> None:
        s += "Fire is hot. Ice is" + sgl.select("ice", [" hot", " cold"])
        s += ". So the answer is" + sgl.gen("text", max_tokens=2, ignore_eos=True)

    state = judge.run(temperature=0, backend=backend)
    assert state["ice"] == " cold"
    assert state.text().startswith("Fire is hot. Ice is cold. So the answer is")
    assert len(state["text"]) > 0


def test_errors_reach_the_program(backend: Any) -> None:
    @sgl.function
    def wrong(s: Any) -> None:
        s += "Hello" + sgl.gen("text", max_tokens=2, top_p=7.0)

    with pytest.warns(UserWarning, match="stream_executor"):
        state = wrong.run(temperature=0, backend=backend)
        state.sync()
    with pytest.raises(RuntimeError, match="top_p must be in"):
        raise state.error()


def test_flush_through_the_client(backend: Any, server: RunningServer) -> None:
    assert server.get("/get_load").json()[0]["num_reqs"] == 0
    backend.flush_cache()
    assert server.get("/server_info").json()["cache"]["pages_used"] == 0
