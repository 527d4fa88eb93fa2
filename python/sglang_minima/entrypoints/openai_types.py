"""Bodies of the OpenAI routes, and how they become prompts with sampling parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_minima.entrypoints.generate_input import check_range, check_rid
from sglang_minima.entrypoints.unsupported import EngineExtras
from sglang_minima.sampling_params import MAX_NEW_TOKENS, InvalidRequest, SamplingParams
from sglang_minima.tokenization.inputs import PromptInput, namespace_of

MAX_COMPLETION_LOGPROBS = 20
ROLES = ("system", "developer", "user", "assistant", "tool")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonBody(EngineExtras, kw_only=True):
    """Fields of both routes; unknown keys are ignored, null means default."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None

    def check_supported(self, names: tuple[str, ...] = ()) -> None:
        """Raises `InvalidRequest` for what cannot be honoured and must not be ignored."""
        self.refuse_extras()
        for name in (*_UNSUPPORTED, *names):
            if getattr(self, name) not in (None, False, "", [], {}):
                raise InvalidRequest(f"{name} is not supported yet")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise InvalidRequest(f"response_format of type {kind!r} is not supported yet")

    def sampling(self, max_tokens: int, vocab_size: int) -> SamplingParams:
        """The sampling parameters of every prompt of the call."""
        values = {
            "max_new_tokens": max_tokens,
            "min_new_tokens": self.min_tokens,
            "sampling_seed": self.seed,
        } | {name: getattr(self, name) for name in _SAME_NAME}
        try:
            return SamplingParams.from_dict(values, vocab_size)
        except InvalidRequest as error:
            message = str(error).removeprefix("sampling_params").lstrip(".: ")
            for ours, theirs in _RENAMED:
                message = message.replace(ours, theirs)
            raise InvalidRequest(message) from None

    def prompt_input(
        self,
        prompt: str | list[int],
        rid: str,
        sampling: SamplingParams,
        top_logprobs: int | None,
        echo: bool = False,
    ) -> PromptInput:
        """One prompt of the call; `top_logprobs` is None when no log-probabilities are wanted."""
        return PromptInput(
            prompt=prompt,
            sampling=sampling,
            rid=rid,
            salt=namespace_of(self.extra_key, self.cache_salt),
            priority=check_range("priority", self.priority or 0, -(1 << 31), 1 << 31),
            return_logprob=top_logprobs is not None,
            logprob_start_len=0 if echo else -1,
            top_logprobs_num=top_logprobs or 0,
            return_text_in_logprobs=True,
        )

    def request_id(self, prefix: str, fresh: str) -> str:
        """The client's rid, or a new id; it is also the id of the reply."""
        return f"{prefix}-{fresh}" if self.rid is None else check_rid(self.rid)


_UNSUPPORTED = (
    "regex",
    "ebnf",
    "json_schema",
    "structural_tag",
)
_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_RENAMED = (
    ("max_new_tokens", "max_tokens"),
    ("min_new_tokens", "min_tokens"),
    ("sampling_seed", "seed"),
)


class CompletionBody(CommonBody, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        self.check_supported(("suffix",))
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of is only supported when it equals n")
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, MAX_COMPLETION_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts, or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if not kinds:
            raise InvalidRequest("prompt is an empty list")
        if len(kinds) > 1:
            raise InvalidRequest("prompt mixes texts, token ids and lists of token ids")
        if kinds == {int}:
            return [[item for item in self.prompt if isinstance(item, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]


class ChatBody(CommonBody, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        self.check_supported(("functions",))
        if self.tools and self.tool_choice != "none":
            raise InvalidRequest("tools are not supported yet")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice is not supported yet")
        if self.top_logprobs is not None:
            check_range("top_logprobs", self.top_logprobs, 0, MAX_COMPLETION_LOGPROBS)
            if self.top_logprobs and not self.logprobs:
                raise InvalidRequest("top_logprobs needs logprobs: true")

    def output_limit(self) -> int:
        """Default: the rest of the context (the manager clips it)."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return MAX_NEW_TOKENS if self.max_tokens is None else self.max_tokens

    def checked_messages(self) -> list[dict[str, Any]]:
        """The messages as the chat template gets them."""
        if not self.messages:
            raise InvalidRequest("messages is empty")
        checked = [_message(index, message) for index, message in enumerate(self.messages)]
        if self.continue_final_message and checked[-1]["role"] != "assistant":
            raise InvalidRequest("continue_final_message needs a last message of the assistant")
        return checked


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"messages[{index}].role must be one of {', '.join(ROLES)}")
    # Newer clients call the system role "developer"; templates only know the old name.
    role = "system" if role == "developer" else role
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        content = [_part(index, part) for part in content]
    elif not isinstance(content, str):
        raise InvalidRequest(f"messages[{index}].content must be a text or a list of text parts")
    return {**message, "role": role, "content": content}


def _part(index: int, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequest(f"messages[{index}].content: only parts of type text are supported")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"messages[{index}].content: a text part needs a text")
    return part
