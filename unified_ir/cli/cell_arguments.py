"""`--cell-args`: arguments of a cell's constructor, checked against its signature."""

from __future__ import annotations

import contextlib
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter as Argument
from typing import Any, Final, Literal

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
            return dict(json.loads(text, object_pairs_hook=_once))
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"--cell-args is no JSON object: {error}") from None
    pairs = [item.partition("=") for item in text.split(",")]
    if not all(name.strip().isidentifier() and equals for name, equals, _ in pairs):
        raise InvalidInput(
            "--cell-args is NAME=VALUE,NAME=VALUE, or a JSON object such as "
            f'{{"sizes": [8, 16]}}, got {text!r:.200}'
        )
    return _once([(name.strip(), _Text(value.strip())) for name, _, value in pairs])


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict; refuse a name that stands twice, of which one would be ignored."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in values if names.count(name) > 1)
        raise InvalidInput(f"--cell-args has {twice!r} {names.count(twice)} times; state it once")
    return values


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
    hints = _hints(make)
    kinds = {name: kind for name, hint in hints.items() if (kind := _plain(hint)) is not None}
    defaults = {name: p.default for name, p in named.items()}
    values = {k: _typed(k, v, kinds.get(k), defaults.get(k)) for k, v in arguments.items()}
    for name, value in values.items():
        _check_literal(name, value, hints.get(name))
    return make(**values)


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the arguments, none where they cannot be read."""
    function = getattr(make, _INIT) if isinstance(make, type) else make
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return {}  # annotations of a user's file may name what exists for type checkers only


def _plain(hint: Any) -> type | None:
    """Return the plain type that an annotation states; None beside it is left out."""
    hint = _without_none(hint)
    if typing.get_origin(hint) is Literal:
        kinds = {type(choice) for choice in typing.get_args(hint)}
        hint = kinds.pop() if len(kinds) == 1 else None
    return hint if hint in _KINDS else None


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    return parts[0] if len(parts) == 1 else None


def _check_literal(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that is none of the choices of an annotation `Literal[...]`."""
    literal = _without_none(hint)
    if typing.get_origin(literal) is not Literal or (value is None and literal is not hint):
        return
    choices = typing.get_args(literal)
    if value not in choices:
        raise InvalidInput(
            f"--cell-args: {name} must be one of {', '.join(map(repr, choices))}, got "
            f"{value!r:.80}{suggestion(value, [c for c in choices if isinstance(c, str)])}"
        )


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
