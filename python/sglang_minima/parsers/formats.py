"""Formats of tool calls, where reasoning begins, and the grammars that force calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from sglang_minima.grammar.spec import Grammar
from sglang_minima.parsers.reasoning import END_THINK, THINK
from sglang_minima.parsers.schema_types import Schema
from sglang_minima.parsers.tool_calls import Llama3Parser, TaggedParser, ToolParser
from sglang_minima.parsers.xml_reader import XmlCallReader

_ALWAYS_REASON = ("deepseek-r1", "qwen3-thinking")
"""Reasoning formats of models that begin every answer with reasoning."""
_MAX_SPACE = 8
"""White space between two parts of forced arguments: a weak model would write nothing else."""


class ToolFormat(Protocol):
    """How a family of models writes tool calls."""

    @property
    def name(self) -> str: ...

    @property
    def separator(self) -> str:
        """Between two calls."""
        ...

    @property
    def trigger(self) -> str:
        """How a call begins in free text."""
        ...

    @property
    def manner(self) -> str:
        """Tells a model how to call, where the chat template does not."""
        ...

    def parser(self, tools: Mapping[str, Schema]) -> ToolParser:
        """A parser of one answer to a prompt with these tools (schemas by name)."""
        ...

    def call_text(self, name: str, arguments: Any) -> str:
        """A call as the model would write it."""
        ...

    def tag(self, name: str, schema: Schema) -> dict[str, Any]:
        """The structural tag of a call of one tool."""
        ...


@dataclass(frozen=True)
class JsonFormat:
    """A call is a JSON object, with or without tags around it."""

    name: str
    arguments_key: str
    begin: str
    """Before the JSON object of a call."""
    end: str
    separator: str
    trigger: str
    manner: str

    def parser(self, tools: Mapping[str, Schema]) -> ToolParser:
        """See `ToolFormat`."""
        return TaggedParser() if self.begin else Llama3Parser(tools)

    def call_text(self, name: str, arguments: Any) -> str:
        """See `ToolFormat`."""
        call = json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)
        return f"{self.begin}{call}{self.end}"

    def tag(self, name: str, schema: Schema) -> dict[str, Any]:
        """See `ToolFormat`."""
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments_key}": '
        return _tag(self.begin + head, schema, "json", "}" + self.end)


@dataclass(frozen=True)
class XmlFormat:
    """A call is a function element with one element for each argument, in <tool_call> tags.

    Format: chat template of Qwen3-Coder.
    """

    name: str
    separator: str
    trigger: str
    manner: str

    def parser(self, tools: Mapping[str, Schema]) -> ToolParser:
        """See `ToolFormat`."""
        return TaggedParser(partial(XmlCallReader, tools))

    def call_text(self, name: str, arguments: Any) -> str:
        """See `ToolFormat`; arguments that are no object are left out, as there is no name for
        them."""
        lines = [f"<function={name}>"]
        for key, value in arguments.items() if isinstance(arguments, dict) else ():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines += [f"<parameter={key}>", text, "</parameter>"]
        return "\n".join(["<tool_call>", *lines, "</function>", "</tool_call>"])

    def tag(self, name: str, schema: Schema) -> dict[str, Any]:
        """See `ToolFormat`."""
        begin = f"<tool_call>\n<function={name}>\n"
        return _tag(begin, schema, "qwen_xml", "</function>\n</tool_call>")


def _tag(begin: str, schema: Schema, style: str, end: str) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_SPACE}
    return {"type": "tag", "begin": begin, "content": content | {"style": style}, "end": end}


_HERMES = JsonFormat(
    "hermes",
    "arguments",
    "<tool_call>\n",
    "\n</tool_call>",
    "\n",
    "<tool_call>",
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
)
"""In words of Qwen 2.5 and Hermes, which models of many families have seen."""
_LLAMA3 = JsonFormat(
    "llama3",
    "parameters",
    "",
    "",
    "; ",
    '{"name": ',
    "To call a function, answer with nothing but a JSON object of its name and its arguments:\n"
    '{"name": <function-name>, "parameters": <args-json-object>}',
)
_QWEN3_CODER = XmlFormat(
    "qwen3_coder",
    "\n",
    "<tool_call>",
    "To call a function, write its name and each of its arguments like this:\n"
    "<tool_call>\n<function=name-of-the-function>\n<parameter=name-of-the-argument>\n"
    "value\n</parameter>\n</function>\n</tool_call>",
)
TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "llama3": _LLAMA3,
    "qwen3_coder": _QWEN3_CODER,
}


def detect_tool_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches; None when it has tools in a format unknown here.

    Templates that know no tools get them in Hermes' words (see `spell_out_tools`).
    """
    if template is None or not knows_tools(template):
        return _HERMES
    if "<tool_call>" in template:
        return _QWEN3_CODER if "<function=" in template else _HERMES
    if "python_tag" in template or '"parameters"' in template or "ipython" in template:
        return _LLAMA3
    return None


def knows_tools(template: str | None) -> bool:
    """Whether a chat template can tell the model about tools."""
    return template is not None and "tools" in template


def begins_with_reasoning(name: str | None, prompt_end: str) -> bool:
    """Whether an answer is reasoning from its first character on.

    Args:
        name: the model's reasoning format, None when it has none.
        prompt_end: the last text of the prompt; templates open or close the reasoning there.
    """
    end = prompt_end.rstrip()
    return end.endswith(THINK) or (name in _ALWAYS_REASON and not end.endswith(END_THINK))


def calls_grammar(
    tool_format: ToolFormat,
    tools: Sequence[tuple[str, Schema]],
    required: bool,
    parallel: bool,
) -> str:
    """A structural tag for answers with tool calls (JSON text).

    Args:
        tool_format: how calls are written.
        tools: names and parameter schemas.
        required: the answer is nothing but calls, at least one; else text and calls.
        parallel: more than one call is allowed.
    """
    calls: dict[str, Any] = {
        "tags": [tool_format.tag(name, schema) for name, schema in tools],
        "stop_after_first": not parallel,
    }
    if required:
        calls |= {"type": "tags_with_separator", "separator": tool_format.separator}
        calls["at_least_one"] = True
    else:
        calls |= {"type": "triggered_tags", "triggers": [tool_format.trigger]}
    return json.dumps({"type": "structural_tag", "format": calls})


def after_reasoning(grammar: Grammar) -> Grammar:
    """A grammar for answers that begin inside reasoning and follow `grammar` behind it."""
    answer: dict[str, Any]
    match grammar.kind:
        case "structural_tag":
            answer = json.loads(grammar.text)["format"]
        case "json_schema":
            answer = {"type": "json_schema", "json_schema": json.loads(grammar.text)}
        case "regex":
            answer = {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            answer = {"type": "grammar", "grammar": grammar.text}
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": END_THINK}
    space = {"type": "regex", "pattern": "\\n{0,2}"}
    whole = {"type": "sequence", "elements": [thought, space, answer]}
    return Grammar.structural_tag({"type": "structural_tag", "format": whole})
