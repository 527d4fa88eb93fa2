"""Body of `/v1/chat/completions`, and the conversation that it describes."""

from __future__ import annotations

from typing import Any

from sglang_minima.entrypoints.chat_messages import Message, check_messages
from sglang_minima.entrypoints.conversation import Conversation
from sglang_minima.entrypoints.generate_input import check_range
from sglang_minima.entrypoints.openai_types import MAX_COMPLETION_LOGPROBS, CommonBody
from sglang_minima.entrypoints.tools import openai_tool_choice, openai_tools
from sglang_minima.sampling_params import MAX_NEW_TOKENS, InvalidRequest
from sglang_minima.tokenization.inputs import check_token_ids


class ChatBody(CommonBody, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[Message] | None = None
    input_ids: list[int] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    modalities: list[str] | None = None
    audio: Any = None

    def check(self) -> None:
        """Raises `InvalidRequest` for what cannot be honoured."""
        self.check_supported(("audio",))
        if self.functions or self.function_call not in (None, "none", "auto"):
            raise InvalidRequest("functions are not supported any more; use tools")
        if self.modalities not in (None, [], ["text"]):
            raise InvalidRequest("modalities: only text is supported")
        if self.top_logprobs is not None:
            check_range("top_logprobs", self.top_logprobs, 0, MAX_COMPLETION_LOGPROBS)
            if self.top_logprobs and not self.logprobs:
                raise InvalidRequest("top_logprobs needs logprobs: true")

    def output_limit(self) -> int:
        """Default: the rest of the context (the manager clips it)."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return MAX_NEW_TOKENS if self.max_tokens is None else self.max_tokens

    def conversation(self, vocab_size: int) -> Conversation:
        """What is to be said, by whom, with which tools."""
        tools = openai_tools(self.tools)
        messages: list[Message] = []
        if self.input_ids is None:
            messages = check_messages(self.messages or [])
        else:
            check_token_ids(self.input_ids, vocab_size, "input_ids")
        continues = bool(self.continue_final_message)
        if continues and (not messages or messages[-1]["role"] != "assistant"):
            raise InvalidRequest("continue_final_message needs a last message of the assistant")
        if continues and len(messages) > 1 and _is_empty(messages[-1]):
            # To continue nothing is to begin. Templates that trim what they print would else have
            # the prompt end before the white space behind the header.
            messages.pop()
            continues = False
        arguments = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", self.reasoning_effort)
        return Conversation(
            messages,
            tools,
            openai_tool_choice(self.tool_choice, tools),
            parallel=self.parallel_tool_calls is not False,
            continues=continues,
            template_arguments=arguments,
            split_reasoning=self.separate_reasoning is not False,
            prompt=self.input_ids,
        )


def _is_empty(message: Message) -> bool:
    return not any(message.get(key) for key in ("content", "tool_calls", "reasoning_content"))
