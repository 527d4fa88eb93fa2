"""Writes `docs/flags.md` from the settings of the server: `python docs/make_flags.py`."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_minima.foreign_flags import FOREIGN_FLAGS, ForeignFlag
from sglang_minima.server_args import ServerArgs
from sglang_minima.settings import GROUPS, flag_name

PAGE = Path(__file__).with_name("flags.md")
_HEAD = """\
# Flags

Written by `python docs/make_flags.py` from the settings themselves; `--help` shows the same.

TOKENS and BYTES take `k`, `m` and `g` (binary: `32k` is 32,768). A switch is on when it is named;
`--switch=false` takes back what a config file set. `Engine(...)` takes the same settings as
arguments, with underscores.

## Config file

`--config server.yaml` reads settings from a YAML file. Keys are flag names, with dashes or
underscores; the command line wins over the file; an unknown key is an error that names the nearest
known one.

```yaml
# server.yaml
port: 8000
max-total-tokens: 64k
kv-profile: minima
log-requests: true
```
"""
_FOREIGN = """\
## Flags of SGLang that have no setting here

Accepted, with a note at the start where the reason may matter:

{accepted}

Refused, with the reason:

{refused}
"""


def render() -> str:
    """The page."""
    parts = [_HEAD]
    hints = typing.get_type_hints(ServerArgs)
    for group, about in GROUPS.items():
        rows = [
            _row(entry, hints[entry.name])
            for entry in dataclasses.fields(ServerArgs)
            if entry.metadata["group"] == group
        ]
        head = "| flag | what | default |\n| --- | --- | --- |\n"
        parts.append(f"## {group.capitalize()}: {about}\n\n{head}" + "".join(rows))
    accepted = _foreign(flag for flag in FOREIGN_FLAGS if not flag.refused)
    refused = _foreign(flag for flag in FOREIGN_FLAGS if flag.refused)
    parts.append(_FOREIGN.format(accepted=accepted, refused=refused))
    return "\n".join(parts)


def _row(entry: dataclasses.Field[Any], kind: Any) -> str:
    meta = entry.metadata
    flags = ", ".join(f"`{flag}`" for flag in (flag_name(entry.name), *meta["flags"]))
    if kind is not bool and typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = typing.get_args(kind)[0]
    if kind is bool:
        value = ""
    elif typing.get_origin(kind) is typing.Literal:
        value = " " + "\\|".join(typing.get_args(kind))
    else:
        value = " " + (meta["unit"] or entry.name.rsplit("_", 1)[-1].upper())
    default = "off" if kind is bool else "" if entry.default in (None, "") else str(entry.default)
    return f"| {flags}{value} | {meta['help']} | {default} |\n"


def _foreign(flags: Iterable[ForeignFlag]) -> str:
    """One line for every reason."""
    names: dict[str, list[str]] = {}
    for flag in flags:
        values = f" ({' or '.join(flag.values)})" if flag.values else ""
        names.setdefault(flag.says, []).extend(f"`{name}`{values}" for name in flag.flags)
    return "\n".join(f"- {', '.join(same)}: {says}" for says, same in names.items())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
