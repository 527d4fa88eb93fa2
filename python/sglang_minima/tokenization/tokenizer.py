"""`Tokenizer`: text to token ids and back, and the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerFast

from sglang_minima.models.config import ModelConfig
from sglang_minima.models.errors import ModelLoadError

# Arguments of transformers' method that a client's template arguments must not reach.
_RESERVED = frozenset(
    {
        "chat_template",
        "conversation",
        "documents",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)

# A template is a program: on messages it did not expect it can fail in any of these ways.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


def _byte_symbols() -> dict[str, int]:
    """Symbol -> byte of byte-level vocabularies (GPT-2's table): printable bytes stand for
    themselves, the others for characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_SYMBOLS = _byte_symbols()


class Tokenizer:
    """The tokenizer of a directory in Hugging Face format."""

    eos_token_ids: frozenset[int]
    """Tokens that end a generation: of the model's configs and of the tokenizer."""
    special_ids: frozenset[int]
    """Special tokens: those that decoding leaves out."""
    bos_token_id: int | None
    vocab_size: int
    """Of the model's logits; the tokenizer may know fewer ids, which then decode to nothing."""

    def __init__(self, inner: PreTrainedTokenizerFast, config: ModelConfig) -> None:
        self._inner = inner
        self._backend = inner.backend_tokenizer
        self._byte_values = _byte_fallback_values(inner)
        self.vocab_size = config.vocab_size
        self.bos_token_id = (
            config.bos_token_id if inner.bos_token_id is None else inner.bos_token_id
        )
        own = () if inner.eos_token_id is None else (inner.eos_token_id,)
        added = inner.added_tokens_decoder.items()
        self.special_ids = frozenset(token for token, entry in added if entry.special)
        self.eos_token_ids = config.eos_token_ids | frozenset(own)

    @classmethod
    def load(cls, path: Path | str, chat_template: str | None = None) -> Tokenizer:
        """Reads the tokenizer.

        Args:
            path: directory with config.json and tokenizer.json.
            chat_template: replaces the model's; the path of a Jinja file, or a template itself.

        Raises:
            ModelLoadError: no tokenizer.json, one that cannot be read, or a template that is given
                and no Jinja.
        """
        path = Path(path)
        config = ModelConfig.load(path)
        if not (path / "tokenizer.json").is_file():
            raise ModelLoadError(f"{path} has no tokenizer.json.")
        try:
            inner = PreTrainedTokenizerFast.from_pretrained(path)
        # tokenizers raises bare Exception for a file it cannot parse.
        except Exception as error:
            raise ModelLoadError(f"The tokenizer in {path} cannot be read: {error}.") from None
        if chat_template is not None:
            inner.chat_template = _read_template(chat_template)
            _check_syntax(inner)
        return cls(inner, config)

    @property
    def hugging_face(self) -> PreTrainedTokenizerFast:
        """The tokenizer that this one wraps, for libraries that want that."""
        return self._inner

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return self._inner.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template; of all of them where a model has one for tools as well."""
        template = self._inner.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def token_id(self, text: str) -> int | None:
        """The id of a token of exactly this text; None when there is none."""
        token: int | None = self._backend.token_to_id(text)
        return token

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it become their ids.

        Args:
            text: any string.
            add_special_tokens: add what the model expects around a text (such as BOS).

        Raises:
            ValueError: the text has lone surrogates, so it is not valid Unicode.
        """
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError("text is not valid Unicode: it has a lone surrogate") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, unknown ids nothing.

        Args:
            ids: each in [0, 2³²).
            skip_special_tokens: leave special tokens out.
            spaces_between_special_tokens: accepted for SGLang's clients. As there, it only
                concerns tokenizers in pure Python; these ones never add spaces.
        """
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """Text of every id alone, special tokens included."""
        texts: list[str] = self._backend.decode_batch(
            [[token] for token in ids], skip_special_tokens=False
        )
        return texts

    def byte_value(self, token: int) -> int | None:
        """The byte that a byte-fallback token stands for; None for all other tokens."""
        return self._byte_values.get(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token alone stands for; they need not be valid UTF-8."""
        byte = self.byte_value(token)
        if byte is not None:
            return bytes([byte])
        text = self.decode_each([token])[0]
        if "\ufffd" in text:
            # Part of a character: byte-level vocabularies write each byte as a character.
            symbols = self._backend.id_to_token(token) or ""
            if symbols and all(symbol in _BYTE_SYMBOLS for symbol in symbols):
                return bytes(_BYTE_SYMBOLS[symbol] for symbol in symbols)
        return text.encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: objects with "role" and "content"; content is a string, null, or a list of
                {"type": "text", "text": ...} parts, which are joined by spaces.
            tools: JSON schemas of functions, for templates that know tools.
            add_generation_prompt: end with the header of an assistant's turn.
            continue_final_message: leave the last message open, to be continued. Takes
                precedence over `add_generation_prompt`.
            kwargs: variables of the template, e.g. enable_thinking.

        Raises:
            ValueError: no template, malformed messages, or the template refuses them.
        """
        if not self.has_chat_template:
            raise ValueError("this model has no chat template; pass one with --chat-template")
        reserved = _RESERVED & kwargs.keys()
        if reserved:
            raise ValueError(f"chat template arguments may not include {min(reserved)!r}")
        conversation = _plain_messages(messages)
        try:
            text = self._inner.apply_chat_template(
                conversation,
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except _REFUSALS as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return self.encode(str(text), add_special_tokens=False)


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ValueError("messages must be a non-empty list")
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] must be an object with a role")
        content = _plain_content(message.get("content"), f"messages[{index}].content")
        plain.append({**message, "content": content})
    return plain


def _plain_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a string or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ValueError(f"{where} must have only parts of type text")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a part without text")
        texts.append(part["text"])
    return " ".join(texts)


def _byte_fallback_values(inner: PreTrainedTokenizerFast) -> dict[int, int]:
    """Token id -> byte for sentencepiece's tokens <0x00> ... <0xFF>; empty for other models."""
    if not getattr(inner.backend_tokenizer.model, "byte_fallback", False):
        return {}
    ids = ((inner.backend_tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
    return {token: byte for token, byte in ids if token is not None}


def _read_template(template: str) -> str:
    """The template itself if it looks like Jinja, else the content of the file it names."""
    if "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"The chat template {template} cannot be read: {error}.") from None


def _check_syntax(inner: PreTrainedTokenizerFast) -> None:
    """Compiles the chat template, which would otherwise fail at the first chat."""
    try:
        inner.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ModelLoadError(
            f"The chat template cannot be read: {error.message} (line {error.lineno})."
        ) from None
    except _REFUSALS:
        return  # it is a template; which messages it takes is for requests to find
