"""`--cell-args`: arguments of a cell's constructor, checked against its signature."""

from __future__ import annotations

import contextlib
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from inspect import Parameter as Argument
from typing import Any, Final

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import suggestion

_KINDS: Final[Mapping[type, str]] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text",
}  # fmt: skip
_INIT: Final = "__init__"
_BY_NAME: Final = (Argument.POSITIONAL_OR_KEYWORD, Argument.KEYWORD_ONLY)
_WORDS: Final = {"true": True, "false": False, "null": None, "none": None}


def parsed(text: str | None) -> dict[str, Any]:
    """Return the arguments in NAME=VALUE,... (values as texts), or in a JSON object."""
    if text is None:
        return {}
    if text.lstrip().startswith("{"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"--cell-args is no JSON object: {error}") from None
        return dict(values)
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(name.strip().isidentifier() and equals for name, equals, _ in pairs):
        raise InvalidInput(
            "--cell-args is NAME=VALUE,NAME=VALUE, or a JSON object such as "
            f'{{"sizes": [8, 16]}}, got {text!r:.200}'
        )
    return {name.strip(): _Text(value.strip()) for name, _, value in pairs}


class _Text(str):
    """A value that the command line gives as a text, whatever its kind."""

    __slots__ = ()


def created(make: Callable[..., Any], spec: str, text: str | None) -> Any:
    """Return make(...) with the arguments of --cell-args; refuse those that do not fit it."""
    own: Mapping[str, Argument] = {}
    with contextlib.suppress(TypeError, ValueError):  # some built-in callables have no signature
        own = inspect.signature(make).parameters
    named = {k: p for k, p in own.items() if p.kind in _BY_NAME}
    takes_any = any(p.kind is Argument.VAR_KEYWORD for p in own.values())
    arguments = parsed(text)
    unknown = [] if takes_any else [name for name in arguments if name not in named]
    if unknown:
        raise InvalidInput(
            f"{spec} has no argument {unknown[0]!r}; it takes {', '.join(named) or 'none'}"
            f"{suggestion(unknown[0], named)}"
        )
    empty = [name for name, p in named.items() if p.default is Argument.empty]
    if missing := [name for name in empty if name not in arguments]:
        shown = ",".join(f"{name}=..." for name in missing)
        raise InvalidInput(
            f"{spec} needs the arguments {', '.join(missing)}; add --cell-args {shown}"
        )
    kinds = _kinds(make)
    defaults = {name: p.default for name, p in named.items()}
    return make(**{k: _typed(k, v, kinds.get(k), defaults.get(k)) for k, v in arguments.items()})


def _kinds(make: Callable[..., Any]) -> dict[str, type]:
    """Return the plain types that the annotations state; None beside one is left out."""
    function = getattr(make, _INIT) if isinstance(make, type) else make
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return {}  # annotations of a user's file may name what exists for type checkers only
    return {name: kind for name, hint in hints.items() if (kind := _plain(hint)) is not None}


def _plain(hint: Any) -> type | None:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        hint = parts[0] if len(parts) == 1 else None
    return hint if hint in _KINDS else None


def _typed(name: str, value: Any, kind: type | None, default: Any) -> Any:
    """Return a value in the type of its argument, that of the default without an annotation."""
    if kind is None and type(default) in _KINDS:
        kind = type(default)
    if isinstance(value, _Text):
        value = _read(str(value), kind)
    if kind is None or (value is None and default is None):
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise InvalidInput(f"--cell-args: {name} must be {_KINDS[kind]}, got {value!r:.80}")
    return value


def _read(text: str, kind: type | None) -> Any:
    """Return the value that a text stands for; texts stay texts where the argument takes one."""
    if kind is str:
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
