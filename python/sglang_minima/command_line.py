"""The command line of `launch_server`: flags made from `ServerArgs`, a config file, help."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shutil
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

from sglang_minima import __version__
from sglang_minima.config_file import read_config
from sglang_minima.foreign_flags import ELSEWHERE, FOREIGN_FLAGS, ForeignFlag
from sglang_minima.server_args import ServerArgs
from sglang_minima.settings import GROUPS, ArgumentError, flag_name, parse_size

PROGRAM = "python -m sglang_minima.launch_server"
_EXAMPLES = f"""\
Serves a language model that keeps prompt prefixes in compressed KV pages.

  {PROGRAM}                             # the embedded model
  {PROGRAM} --model-path DIR --port 8000
  {PROGRAM} --config server.yaml        # keys are flag names; flags win
"""
_EPILOG = """\
TOKENS and BYTES take k, m, g (binary: 32k = 32768). A switch that the config file sets is taken
back with --switch=false. Flags of SGLang that need no setting here are accepted, others that cannot
be honoured are refused with the reason.
"""
_MAX_WIDTH = 110
_NEAR = 0.7
"""Likeness of two names from which one may have been meant for the other."""


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """Settings from the command line and the config file that it names.

    Prints a note on stderr for every accepted flag that has no setting of its own; exits with
    status 2 and one line when something is wrong.
    """
    parser = build_parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        settings = vars(_parse(parser, arguments))
        for note in settings.pop("notes", []):
            print(f"note: {note}", file=sys.stderr)
        del settings["config"]
        return ServerArgs(**settings)
    except ArgumentError as error:
        parser.error(str(error))


def build_parser() -> argparse.ArgumentParser:
    """The parser of `parse_args`, made from the fields of `ServerArgs`."""
    parser = _Parser(
        prog=PROGRAM,
        usage="%(prog)s [--config FILE] [--FLAG VALUE ...]",
        description=_EXAMPLES,
        epilog=_EPILOG,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="help", help="show this text and exit")
    general.add_argument(
        "--version", action="version", version=__version__, help="show the version and exit"
    )
    general.add_argument(
        "--config", metavar="FILE", help="YAML file of settings, e.g. `max-total-tokens: 64k`"
    )
    groups = {name: parser.add_argument_group(f"{name} ({text})") for name, text in GROUPS.items()}
    hints = typing.get_type_hints(ServerArgs)
    for entry in dataclasses.fields(ServerArgs):
        _add_setting(groups[entry.metadata["group"]], entry, hints[entry.name])
    for foreign in FOREIGN_FLAGS:
        _add_foreign(parser, foreign)
    return parser


class _Parser(argparse.ArgumentParser):
    """Says where a wrong setting stands, and ends with one line."""

    source: str | None = None
    """The config file while it is read."""

    def error(self, message: str) -> NoReturn:
        where = "" if self.source is None else f"{self.source}: "
        self.exit(2, f"{self.prog}: error: {where}{message}\n")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One column for flags, one for texts; the value is named once, after the last spelling."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH) - 2
        super().__init__(prog, max_help_position=32, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        flags = ", ".join(action.option_strings)
        if action.nargs in (0, "?"):
            return flags
        value = "|".join(map(str, action.choices)) if action.choices else str(action.metavar)
        return f"{flags} {value}"


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """The namespace of the arguments over that of the config file over the defaults."""
    assert isinstance(parser, _Parser)
    path = _config_path(arguments)
    values = argparse.Namespace()
    if path is not None:
        content = read_config(path)
        parser.source = path
        tokens = _config_tokens(parser, content)
        values = parser.parse_args(tokens, values)
        parser.source = None
    values, unknown = parser.parse_known_args(arguments, values)
    if unknown:
        parser.error("; ".join(_unknown(parser, unknown)))
    return values


def _config_path(arguments: Sequence[str]) -> str | None:
    finder = _Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path: str | None = finder.parse_known_args(arguments)[0].config
    return path


def _config_tokens(parser: argparse.ArgumentParser, values: dict[str, Any]) -> list[str]:
    """A config file as arguments.

    Raises:
        ArgumentError: a key is no flag; every such key is named.
    """
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    for flag in ("--config", "--help", "-h", "--version"):
        del actions[flag]
    unknown = [flag for flag in values if flag not in actions]
    if unknown:
        known = [flag for flag in _own_flags(parser) if flag in actions]
        parser.error(
            "; ".join(f"unknown key {flag[2:]}{_nearest(flag, known, '')}" for flag in unknown)
        )
    tokens = []
    for flag, value in values.items():
        if actions[flag].nargs == "*":
            tokens.append(flag)
            continue
        switch = actions[flag].nargs in (0, "?")
        if switch != isinstance(value, bool):
            parser.error(f"{flag[2:]} takes {'true or false' if switch else 'a value'}")
        if not switch:
            tokens.append(f"{flag}={value}")
        elif actions[flag].nargs == "?":
            tokens.append(f"{flag}={str(value).lower()}")
        elif value:
            tokens.append(flag)
    return tokens


def _unknown(parser: argparse.ArgumentParser, texts: Sequence[str]) -> list[str]:
    flags = [text.partition("=")[0] for text in texts if text.startswith("-")]
    if not flags:
        return [f"unexpected argument {text!r}" for text in texts]
    # What follows an unknown flag is most likely its value.
    known = _own_flags(parser)
    return [f"unknown flag {flag}{_nearest(flag, known, '--')}" for flag in flags]


def _own_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Flags that may be suggested: not those of SGLang that have no setting here."""
    return [
        flag
        for flag, action in parser._option_string_actions.items()
        if not isinstance(action, _ForeignAction)
    ]


def _nearest(flag: str, known: Iterable[str], prefix: str) -> str:
    """What may have been meant, in brackets; empty when nothing is near."""
    name = flag.lstrip("-").replace("_", "-").lower()
    if name in ELSEWHERE:
        return f" ({ELSEWHERE[name]})"
    names = [other.lstrip("-") for other in known]
    near = difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""


def _add_setting(group: argparse._ArgumentGroup, entry: dataclasses.Field[Any], kind: Any) -> None:
    meta = entry.metadata
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(arm for arm in typing.get_args(kind) if arm is not type(None))
    flags = (flag_name(entry.name), *meta["flags"])
    text = meta["help"].replace("%", "%%")
    if kind is bool:
        group.add_argument(
            *flags,
            dest=entry.name,
            nargs="?",
            const=True,
            default=entry.default,
            type=_truth,
            metavar="BOOL",
            help=text,
        )
        return
    if entry.default not in (None, ""):
        text += " (default: %(default)s)"
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
    refused = meta["refused"]
    group.add_argument(
        *flags,
        dest=entry.name,
        default=entry.default,
        type=partial(_choice, refused) if choices else _size if meta["size"] else kind,
        choices=choices,
        metavar=None if choices else meta["unit"] or entry.name.rsplit("_", 1)[-1].upper(),
        help=text,
    )


def _choice(refused: Mapping[str, str], text: str) -> str:
    if text in refused:
        raise argparse.ArgumentTypeError(f"{text} is not supported: {refused[text]}")
    return text


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _add_foreign(parser: argparse.ArgumentParser, foreign: ForeignFlag) -> None:
    known = parser._option_string_actions
    flags = [flag for flag in foreign.flags if flag not in known]
    if flags:
        parser.add_argument(
            *flags,
            action=partial(_ForeignAction, foreign=foreign),  # type: ignore[arg-type]
            dest="notes",
            nargs="*" if foreign.refused else 0 if foreign.is_switch else None,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


class _ForeignAction(argparse.Action):
    """Accepts a flag of SGLang with a note, or refuses it with the reason."""

    def __init__(self, *args: Any, foreign: ForeignFlag, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._foreign = foreign

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        foreign = self._foreign
        value = "" if foreign.is_switch else values
        if foreign.refused:
            parser.error(f"{option_string} is not supported: {foreign.says}")
        if foreign.values and value not in foreign.values:
            allowed = " or ".join(foreign.values)
            parser.error(
                f"{option_string} {value} is not supported, only {allowed}: {foreign.says}"
            )
        sets = foreign.sets.get(value, {})
        for name, setting in sets.items():
            setattr(namespace, name, setting)
        if sets or not foreign.values:
            taken = "".join(f" {setting}" for setting in sets.values() if setting is not True)
            note = f"{option_string} {value}".rstrip() + f": {foreign.says}{taken}"
            namespace.notes = [*getattr(namespace, "notes", []), note]
