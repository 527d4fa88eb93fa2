"""Body of `/v1/messages`, and the conversation that it describes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sglang_minima.entrypoints.anthropic_messages import chat_messages
from sglang_minima.entrypoints.conversation import Conversation
from sglang_minima.entrypoints.tools import NO_TOOLS, Tool, ToolChoice, make_tool
from sglang_minima.entrypoints.unsupported import is_set
from sglang_minima.sampling_params import InvalidRequest, SamplingParams

_MAX_TOOL_NAME = 128


class CountBody(msgspec.Struct, kw_only=True):
    """`/v1/messages/count_tokens`; unknown keys are ignored, null means default."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    """The older place of `output_config.format`."""
    cache_control: dict[str, Any] | None = None

    def conversation(self) -> Conversation:
        """What is to be said, by whom, with which tools.

        Raises:
            InvalidRequest: a message or a tool is malformed or not supported.
        """
        messages = chat_messages(self.system, self.messages)
        tools = [_tool(f"tools[{index}]", raw) for index, raw in enumerate(self.tools or [])]
        choice, parallel = _choice(self.tool_choice, tools)
        continues = messages[-1]["role"] == "assistant"
        if continues and "tool_calls" in messages[-1]:
            raise InvalidRequest("the last message calls a tool: its result must follow")
        arguments: dict[str, Any] = {}
        if self.thinking is not None:
            arguments["enable_thinking"] = self.thinking.get("type") != "disabled"
        effort = (self.output_config or {}).get("effort")
        if effort is not None:
            arguments["reasoning_effort"] = effort
        return Conversation(messages, tools, choice, parallel, continues, arguments)


class MessagesBody(CountBody, kw_only=True):
    """`/v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None

    def sampling(self, vocab_size: int, structural_tag: str | None) -> SamplingParams:
        """The sampling parameters; `structural_tag` is the grammar of forced tool calls."""
        values: dict[str, Any] = {
            "max_new_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if structural_tag is not None:
            values["structural_tag"] = structural_tag
        for name in _FOREIGN_FORMATS:
            if is_set(getattr(self, name)):
                raise InvalidRequest(f"{name} is no field of this API: use output_config.format")
        output_format = (self.output_config or {}).get("format", self.output_format)
        if output_format is not None:
            if not isinstance(output_format, dict) or output_format.get("type") != "json_schema":
                raise InvalidRequest("output_config.format must be of type json_schema")
            values["json_schema"] = output_format.get("schema")
        try:
            return SamplingParams.from_dict(values, vocab_size)
        except InvalidRequest as error:
            message = str(error).removeprefix("sampling_params").lstrip(".: ")
            for ours, theirs in _RENAMED:
                message = message.replace(ours, theirs)
            raise InvalidRequest(message) from None

    @property
    def marks_cache(self) -> bool:
        """Whether `cache_control` stands anywhere in the request."""
        return any(_marks([self.cache_control, self.system, self.tools, self.messages]))


_FOREIGN_FORMATS = (
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "regex",
    "ebnf",
    "json_schema",
)
_RENAMED = (("max_new_tokens", "max_tokens"), ("stop ", "stop_sequences "))


def _marks(value: Any) -> Iterator[bool]:
    if isinstance(value, dict):
        yield value.get("cache_control") is not None or value.get("type") == "ephemeral"
        yield from _marks(value.get("content"))
    elif isinstance(value, list):
        for item in value:
            yield from _marks(item)


def _tool(where: str, raw: dict[str, Any]) -> Tool:
    kind = raw.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequest(f"{where} is of type {kind!r}: this server runs no tools of its own")
    if not isinstance(raw.get("input_schema"), dict):
        raise InvalidRequest(f"{where} needs an input_schema")
    strict = raw.get("strict") is True
    return make_tool(
        raw.get("name"),
        raw.get("description"),
        raw["input_schema"],
        strict,
        where,
        _MAX_TOOL_NAME,
    )


def _choice(raw: dict[str, Any] | None, tools: list[Tool]) -> tuple[ToolChoice, bool]:
    """The choice, and whether more than one call is allowed."""
    choices = {"auto": ToolChoice("auto"), "any": ToolChoice("required"), "none": NO_TOOLS}
    if raw is None:
        return choices["auto" if tools else "none"], True
    parallel = raw.get("disable_parallel_tool_use") is not True
    kind, name = raw.get("type"), raw.get("name")
    if kind == "tool" and isinstance(name, str):
        return ToolChoice("required", name), parallel
    if not isinstance(kind, str) or kind not in choices:
        raise InvalidRequest("tool_choice must be of type auto, any, none, or tool with a name")
    return choices[kind], parallel
