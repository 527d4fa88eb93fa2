"""`ChatRenderer`: what both chat APIs boil down to becomes a prompt, a grammar and a parser."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang_minima.entrypoints.chat_messages import Message, one_call_a_turn, spell_out_tools
from sglang_minima.entrypoints.tools import NO_TOOLS, Tool, ToolChoice, check_tools
from sglang_minima.parsers.answer import AnswerFormat
from sglang_minima.parsers.formats import (
    TOOL_FORMATS,
    after_reasoning,
    begins_with_reasoning,
    calls_grammar,
    detect_tool_format,
    knows_tools,
)
from sglang_minima.parsers.output import OutputParser
from sglang_minima.parsers.reasoning import END_THINK
from sglang_minima.parsers.schema_types import Schema
from sglang_minima.sampling_params import InvalidRequest, SamplingParams
from sglang_minima.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_PROMPT_END = 16
"""Prompt tokens that are looked at for a reasoning tag."""


@dataclass(frozen=True)
class Conversation:
    """One checked chat request."""

    messages: list[Message]
    """As chat templates take them."""
    tools: list[Tool] = field(default_factory=list)
    choice: ToolChoice = NO_TOOLS
    parallel: bool = True
    """More than one call in an answer is allowed."""
    continues: bool = False
    """The answer continues the last message, which is the assistant's."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    split_reasoning: bool = True
    prompt: list[int] | None = None
    """Token ids in place of what the chat template would make."""


@dataclass(frozen=True)
class RenderedChat:
    """A conversation, ready to be generated."""

    prompt: list[int]
    structural_tag: str | None
    """The grammar that the tools put on the answer."""
    reasons_first: bool
    """The answer begins inside reasoning."""
    answer: AnswerFormat
    schemas: dict[str, Schema]
    """Of the tools that may be called, by name."""

    def make_parser(self) -> OutputParser:
        """A parser for one answer."""
        return self.answer.parser(self.schemas)

    def guide(self, sampling: SamplingParams) -> SamplingParams:
        """Parameters whose grammar holds behind the reasoning, if the answer begins with some, and
        that end the answer with the last call that it may have."""
        if self.answer.max_calls is not None and self.structural_tag is None:
            sampling = msgspec.structs.replace(sampling, until_calls=self.answer)
        if not self.reasons_first or sampling.grammar is None:
            return sampling
        try:
            grammar = after_reasoning(sampling.grammar)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        return msgspec.structs.replace(sampling, grammar=grammar)


class ChatRenderer:
    """Renders conversations for one model.

    Args:
        tokenizer: of the model, with its chat template.
        tool_call_parser: name of the tool-call format; None: the one the template shows.
        reasoning_parser: name of the reasoning format; None: the model does not reason aloud.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self.tool_format = (
            detect_tool_format(template)
            if tool_call_parser is None
            else TOOL_FORMATS[tool_call_parser]
        )
        self._reasoning = reasoning_parser
        self._knows_tools = knows_tools(template)
        self.token_bytes = tokenizer.token_bytes
        self._end_think = tokenizer.token_id(END_THINK)

    def render(self, chat: Conversation) -> RenderedChat:
        """The prompt of a conversation, and how to read the answers.

        Raises:
            InvalidRequest: the template refuses it, or the tools cannot be used as asked.
        """
        check_tools(chat.tools, chat.choice)
        tools = [] if chat.choice.mode == "none" else chat.tools
        prompt = self._prompt(chat, tools) if chat.prompt is None else chat.prompt
        end = self._tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
        opened = begins_with_reasoning(self._reasoning, end)
        callable_tools = [tool for tool in tools if chat.choice.allows(tool)]
        reads_calls = self.tool_format is not None and bool(tools)
        answer = AnswerFormat(
            tool_format=self.tool_format.name if self.tool_format and reads_calls else None,
            tool_names=tuple(tool.name for tool in callable_tools),
            max_calls=1 if reads_calls and not chat.parallel else None,
            reasoning=self._reasoning is not None and chat.split_reasoning,
            reasons_first=opened,
            forced=reads_calls and chat.choice.mode == "required",
        )
        schemas: dict[str, Schema] = {tool.name: tool.schema for tool in callable_tools}
        grammar = self._grammar(chat, tools, callable_tools)
        return RenderedChat(prompt, grammar, opened, answer, schemas)

    def reasoning_tokens(self, reasoning: str, output_ids: Sequence[int]) -> int:
        """How many output tokens were reasoning."""
        if not reasoning:
            return 0
        if self._end_think in output_ids:
            return output_ids.index(self._end_think) + 1
        return min(len(self._tokenizer.encode(reasoning, False)), len(output_ids))

    def _prompt(self, chat: Conversation, tools: list[Tool]) -> list[int]:
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest("the model has no chat template; give one with --chat-template")
        messages = chat.messages
        calls = any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        if tools and self.tool_format is None:
            raise InvalidRequest(
                "the chat template has tool calls in a format that this server cannot tell; "
                "give one with --tool-call-parser"
            )
        if (tools or calls) and not self._knows_tools and self.tool_format is not None:
            messages, tools = spell_out_tools(messages, tools, self.tool_format), []
        try:
            return self._apply_template(chat, messages, tools)
        except (ValueError, TypeError) as error:
            if all(len(message.get("tool_calls", ())) < 2 for message in messages):
                raise InvalidRequest(f"the chat template refused the messages: {error}") from None
        try:
            return self._apply_template(chat, one_call_a_turn(messages), tools)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}") from None

    def _apply_template(
        self, chat: Conversation, messages: list[Message], tools: list[Tool]
    ) -> list[int]:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=[tool.spec() for tool in tools] or None,
            add_generation_prompt=not chat.continues,
            continue_final_message=chat.continues,
            **chat.template_arguments,
        )

    def _grammar(
        self, chat: Conversation, tools: list[Tool], callable_tools: list[Tool]
    ) -> str | None:
        """Calls must follow the schemas where the client forces a call, or says strict; where it
        allows only some of the tools, no other may be called."""
        required = chat.choice.mode == "required"
        if self.tool_format is None or not tools:
            return None
        free = not required and len(callable_tools) == len(tools)
        if free and not any(tool.strict for tool in tools):
            return None
        schemas: list[tuple[str, Schema]] = [
            (tool.name, tool.schema if required or tool.strict else {"type": "object"})
            for tool in callable_tools
        ]
        parallel = chat.parallel and chat.choice.name is None
        return calls_grammar(self.tool_format, schemas, required, parallel)
