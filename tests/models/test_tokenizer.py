"""`Tokenizer`: encoding, decoding and chat templates of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from sglang_minima.models import ModelLoadError
from sglang_minima.tokenization.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    "{% if think %}!{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    inner = Inner(BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
    )
    inner.train_from_iterator(["hello world, hello there"] * 3, trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    inner.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": True,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def test_ids_of_the_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == {1, 3}
    assert tokenizer.bos_token_id == 0
    assert tokenizer.vocab_size == 512
    assert tokenizer.has_chat_template


def test_encode(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [0, *plain]
    assert tokenizer.encode("<|user|>hello</s>", add_special_tokens=False) == [2, *plain, 1]
    assert tokenizer.encode("") == [0]
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("a\ud800")


def test_decode(tokenizer: Tokenizer) -> None:
    text = "hello , world . é😀 n't"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text  # nothing is "cleaned up"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
    assert tokenizer.decode([*ids, 511, 70000]) == text
    assert tokenizer.decode([]) == ""


def test_decode_each(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert tokenizer.decode_each([1, *ids, 511]) == ["</s>", "\ufffd", "\ufffd", ""]
    assert tokenizer.decode_each([]) == []


def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 日本 🙂<|user|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [tokenizer.token_bytes(token) for token in ids]
    assert b"".join(pieces) == text.encode()
    # Some tokens are parts of characters, which their text cannot tell.
    assert any("\ufffd" in each for each in tokenizer.decode_each(ids))


def rendered(tokenizer: Tokenizer, messages: Any, **options: Any) -> str:
    return tokenizer.decode(tokenizer.apply_chat_template(messages, **options), False)


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.encode("<|user|>hello</s><|assistant|>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (2, 3)
    assert rendered(tokenizer, messages, add_generation_prompt=False) == "<|user|>hello</s>"
    assert rendered(tokenizer, messages, think=True).endswith("!<|assistant|>")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert "add" in rendered(tokenizer, messages, tools=tools)


def test_content_of_parts_and_null(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert rendered(tokenizer, messages, add_generation_prompt=False) == (
        "<|user|>hello there</s><|assistant|></s>"
    )
    assert messages[0]["content"] is parts  # the caller's objects stay as they are


def test_continue_final_message(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello wor"}]
    assert rendered(tokenizer, messages, continue_final_message=True) == (
        "<|user|>hi</s><|assistant|>hello wor"
    )


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([], {}, "non-empty list"),
        ("hello", {}, "non-empty list"),
        ({"role": "user"}, {}, "non-empty list"),
        (["hello"], {}, r"messages\[0\] must be an object"),
        ([{"role": 3, "content": "a"}], {}, r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": 3}], {}, r"messages\[0\]\.content must be a string"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            {},
            "only parts of type text",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], {}, "part without text"),
        ([{"role": "robot", "content": "a"}], {}, "refuses .*unknown role robot"),
        ([{"role": "user", "content": "a"}], {"tokenize": True}, "may not include 'tokenize'"),
        ([{"role": "user", "content": "a"}], {"chat_template": "x"}, "may not include"),
    ],
)
def test_bad_conversations(
    tokenizer: Tokenizer, messages: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        tokenizer.apply_chat_template(messages, **options)


def test_template_override(directory: Path, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}</s>"
    messages = [{"role": "user", "content": "hello"}]
    assert rendered(Tokenizer.load(directory, template), messages) == "hello</s>"
    (tmp_path / "t.jinja").write_text("{# from a file #}{{ messages[0].content }}!")
    assert rendered(Tokenizer.load(directory, str(tmp_path / "t.jinja")), messages) == "hello!"
    with pytest.raises(ModelLoadError, match=r"chat template .* cannot be read"):
        Tokenizer.load(directory, str(tmp_path / "missing.jinja"))
    with pytest.raises(ModelLoadError, match="chat template cannot be read"):
        Tokenizer.load(directory, "{{ messages[0].content")
    with pytest.raises(ValueError, match="refuses"):
        Tokenizer.load(directory, "{{ messages[9].content }}").apply_chat_template(messages)


def test_template_cannot_reach_the_machine(directory: Path) -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="refuses"):
        Tokenizer.load(directory, escape).apply_chat_template([{"role": "user", "content": ""}])


def test_missing_files(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    inner = (directory / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(inner)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_token_id == 0 and not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
