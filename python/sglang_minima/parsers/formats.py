"""Formats of tool calls, where reasoning begins, and the grammars that force calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_minima.grammar.spec import Grammar
from sglang_minima.parsers.pieces import Parser
from sglang_minima.parsers.reasoning import END_THINK, THINK
from sglang_minima.parsers.tool_calls import HermesParser, Llama3Parser

_MAX_SPACE = 8
"""White space between two parts of forced arguments: a weak model would write nothing else."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    arguments_key: str
    begin: str
    """Before the JSON object of a call."""
    end: str
    separator: str
    """Between two calls."""
    trigger: str
    """How a call begins in free text."""

    def parser(self, tool_names: Collection[str]) -> Parser:
        """A parser of one answer to a prompt with these tools."""
        return HermesParser() if self.begin else Llama3Parser(tool_names)

    def call_text(self, name: str, arguments: Any) -> str:
        """A call as the model would write it."""
        call = json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)
        return f"{self.begin}{call}{self.end}"

    def tag(self, name: str, schema: dict[str, Any] | bool) -> dict[str, Any]:
        """The structural tag of a call of one tool."""
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments_key}": '
        return {
            "type": "tag",
            "begin": self.begin + head,
            "content": {
                "type": "json_schema",
                "json_schema": schema,
                "max_whitespace_cnt": _MAX_SPACE,
            },
            "end": "}" + self.end,
        }


_HERMES = ToolFormat("hermes", "arguments", "<tool_call>\n", "\n</tool_call>", "\n", "<tool_call>")
_LLAMA3 = ToolFormat("llama3", "parameters", "", "", "; ", '{"name": ')
TOOL_FORMATS = {"hermes": _HERMES, "qwen": _HERMES, "llama3": _LLAMA3}


def detect_tool_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches; None when it has tools in a format unknown here.

    Templates that know no tools get them in Hermes' words (see `spell_out_tools`).
    """
    if template is None or not knows_tools(template) or "<tool_call>" in template:
        return _HERMES
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
    return end.endswith(THINK) or (name == "deepseek-r1" and not end.endswith(END_THINK))


def calls_grammar(
    tool_format: ToolFormat,
    tools: Sequence[tuple[str, dict[str, Any] | bool]],
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
