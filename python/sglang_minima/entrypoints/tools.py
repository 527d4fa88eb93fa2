"""Tools that a chat may call, and what a client says about calling them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sglang_minima.sampling_params import InvalidRequest

MAX_TOOLS = 512
MAX_NAME_LENGTH = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""Schema of the arguments of a tool that takes none."""


@dataclass(frozen=True)
class Tool:
    """A function of the client's."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    """JSON schema of its arguments; none, or an empty one: it takes no arguments."""
    strict: bool = False
    """Calls must follow the schema even when the model is free to call or not."""

    @property
    def schema(self) -> dict[str, Any]:
        """What arguments must look like."""
        return self.parameters or NO_PARAMETERS

    def spec(self) -> dict[str, Any]:
        """The form in which chat templates take tools."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.schema
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may, must or must not call tools."""

    mode: Literal["auto", "required", "none"]
    name: str | None = None
    """With "required": the one tool to call."""
    allowed: frozenset[str] | None = None
    """The tools that may be called, of those that the model is told about; None: all."""

    def allows(self, tool: Tool) -> bool:
        """Whether this tool may be called."""
        if self.mode == "none" or (self.name is not None and tool.name != self.name):
            return False
        return self.allowed is None or tool.name in self.allowed


NO_TOOLS = ToolChoice("none")


def make_tool(
    name: Any,
    description: Any,
    parameters: Any,
    strict: bool,
    where: str,
    longest: int = MAX_NAME_LENGTH,
) -> Tool:
    """A checked tool; its name may have up to `longest` characters.

    Raises:
        InvalidRequest: a part of it is not what it must be.
    """
    if not isinstance(name, str) or len(name) > longest or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where} needs a name of 1 to {longest} letters, digits, underscores and dashes"
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}: the description must be a text")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}: the parameters must be a JSON schema (an object)")
    return Tool(name, description, parameters, strict)


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raises `InvalidRequest` for tools and a choice that do not go together."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"a request may have at most {MAX_TOOLS} tools")
    names = {tool.name for tool in tools}
    if len(names) < len(tools):
        raise InvalidRequest("two tools have the same name")
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice asks for a call, but tools is empty")
    chosen = {choice.name} if choice.name is not None else choice.allowed or set()
    for name in sorted(chosen - names):
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools")


def openai_tools(raw: list[Any] | None) -> list[Tool]:
    """Tools in OpenAI's form: {"type": "function", "function": {...}}."""
    tools = []
    for index, item in enumerate(raw or []):
        where = f"tools[{index}]"
        if not isinstance(item, dict) or item.get("type", "function") != "function":
            raise InvalidRequest(f"{where} must be an object of type function")
        function = item.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"{where} needs a function")
        tools.append(
            make_tool(
                function.get("name"),
                function.get("description"),
                function.get("parameters"),
                function.get("strict") is True,
                where,
            )
        )
    return tools


def openai_tool_choice(raw: Any, tools: Sequence[Tool]) -> ToolChoice:
    """A `tool_choice` in OpenAI's form; without one the model may call the tools there are."""
    match raw:
        case None:
            return ToolChoice("auto" if tools else "none")
        case "auto" | "required" | "none":
            return ToolChoice(raw)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", name)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed},
        }:
            return ToolChoice(mode, allowed=frozenset(map(_allowed_name, allowed)))
    raise InvalidRequest(
        'tool_choice must be "auto", "required", "none", '
        '{"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", '
        '"tools": [functions]}}'
    )


def _allowed_name(item: Any) -> str:
    match item:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidRequest(
        'tool_choice.allowed_tools.tools must be {"type": "function", "function": {"name": ...}}'
    )
