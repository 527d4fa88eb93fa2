"""What a setting is: a field that describes its flag, and how its value is read and checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, field
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints


class ArgumentError(ValueError):
    """A setting, or a combination of settings, that the server cannot run with."""


_LARGEST_SIZE = 1 << 62

GROUPS = {
    "model": "what runs, and where",
    "server": "who may connect, and what is logged",
    "cache": "how prefixes are kept, and in how much memory",
    "scheduling": "what runs together, and in which order",
}
"""Groups of settings in the order of the help text."""


def setting(
    default: Any,
    group: str,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    size: bool = False,
    unit: str | None = None,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """A dataclass field that also describes its command-line flag.

    Args:
        default: of the field.
        group: one of `GROUPS`.
        help: text of the flag; a default that is neither None nor "" is added to it.
        flags: other spellings.
        size: the flag takes 32k, 2g and the like.
        unit: what the help text shows for the value (default: the last word of the name).
        refused: values of SGLang's flag of this name that cannot be honoured -> the reason.
    """
    metadata = {"group": group, "help": help, "flags": flags, "size": size, "unit": unit}
    metadata["refused"] = refused
    return field(default=default, metadata=metadata)


@cache
def _choices(owner: type) -> dict[str, tuple[Any, ...]]:
    """Types that each setting may have, None among them."""
    hints = get_type_hints(owner)
    return {
        name: (hint,) if get_origin(hint) is Literal or not get_args(hint) else get_args(hint)
        for name, hint in hints.items()
    }


def checked(owner: type, entry: Field[Any], value: Any) -> Any:
    """The value of a setting, a size such as "2g" as a number.

    The command line has checked it, a program has not.

    Args:
        owner: the class that declares the setting.
        entry: its field.

    Raises:
        ArgumentError: the setting cannot have this value.
    """
    expected = ""
    for option in _choices(owner)[entry.name]:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
            expected = f"one of {', '.join(get_args(option))}"
        elif option is NoneType:
            if value is None:
                return value
        elif option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif type(value) is option:
            return value
        elif option is int and isinstance(value, str) and entry.metadata["size"]:
            return parse_size(value)
        else:
            expected = {bool: "true or false", str: "text"}.get(option, "a number")
    raise ArgumentError(f"{flag_name(entry.name)}: {value!r} is not {expected}")


def parse_layers(text: str) -> tuple[int, ...]:
    """ "0,1,-1" -> (0, 1, -1).

    Raises:
        ArgumentError: not a comma-separated list of integers.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ArgumentError(f"--stale-fp8-layers: {text!r} is not a list such as 0,1,-1") from None


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def parse_size(text: str) -> int:
    """ "32k" -> 32768, "2g" -> 2147483648, "512" -> 512, "-1" -> -1 (binary multiples).

    Raises:
        ArgumentError: not a number, or none that any machine has.
    """
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ArgumentError(f"{text!r} is not a number such as 512, 32k or 2g")
    value = float(match[1]) * 1024 ** " kmgt".index(match[2] or " ")
    if abs(value) > _LARGEST_SIZE:
        raise ArgumentError(f"{text[:20]!r} is too large a number")
    return int(value)
