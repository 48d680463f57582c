"""Arguments of public constructors: an error names the class, its arguments and the likely one.

Python's own TypeError names the private class that holds `__init__`, and no argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import Parameter as Argument
from inspect import Signature
from types import FunctionType
from typing import Any, Final

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import nearest
from triplane.unified_ir.ops.source import user_location

# fmt: off
NAMES_ELSEWHERE: Final[Mapping[str, tuple[str, ...]]] = {
    "learning_rate": ("lr", "high", "start"), "betas": ("beta1", "beta2"), "eps": ("epsilon",),
    "weight_decay_rate": ("weight_decay",), "params": (), "maximize": (),
    "T_max": ("steps",), "T_0": ("steps",), "T_mult": ("growth",), "eta_min": ("low",),
    "gamma": ("factor",), "step_size": ("steps",), "milestones": ("bounds",), "max_lr": ("high",),
    "total_steps": ("steps",), "pct_start": ("rise",), "min_lr": ("low",), "mode": ("better",),
    "threshold": ("min_change",), "min_delta": ("min_change",), "monitor": ("measure",),
    "in_features": ("inputs",), "out_features": ("outputs",), "in_channels": ("inputs",),
    "out_channels": ("outputs",), "kernel_size": ("kernel",), "num_features": ("channels",),
    "num_channels": ("channels",), "num_groups": ("groups",), "normalized_shape": ("size",),
    "num_embeddings": ("count",), "embedding_dim": ("size",), "input_size": ("inputs",),
    "hidden_size": ("hidden",), "d_model": ("size",), "embed_dim": ("size",), "nhead": ("heads",),
    "num_heads": ("heads",), "dim_feedforward": ("feedforward",), "dropout": ("p_drop",),
    "p": ("p_drop",), "scale_factor": ("scale",), "output_size": ("size",),
}
# fmt: on
"""Name of an argument in PyTorch or Keras -> ours, for the classes that have it."""
INIT: Final = "__init__"
_SHOWN: Final = (bool, int, float, str, type(None))


class ArgumentError(InvalidInput, TypeError):
    """The arguments of a constructor do not fit its signature."""


def check_arguments(
    cls: type, args: Sequence[Any], kwargs: Mapping[str, Any], *, advice: str = ""
) -> None:
    """Raise ArgumentError unless the arguments fit the class's `__init__`.

    advice: a sentence that the message ends with.
    """
    if not args and not kwargs:
        return  # `copy` and `pickle` create objects this way; Python reports what is missing
    signature = _signature(getattr(cls, INIT))
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        own = list(signature.parameters.values())[1:]
        unknown = [k for k in kwargs if k not in {p.name for p in own}]
        takes_any = any(p.kind is Argument.VAR_KEYWORD for p in own)
        problem = str(error) if takes_any or not unknown else _unknown(unknown[0], own)
        where = user_location()
        raise ArgumentError(
            f"{cls.__name__}: {problem}; it is called {cls.__name__}({_listed(own)})"
            f"{f'; {advice}' if advice else ''}{f' (at {where})' if where else ''}"
        ) from None


@lru_cache(maxsize=512)
def _signature(function: Callable[..., Any]) -> Signature:
    return inspect.signature(function)


def _unknown(name: str, own: Sequence[Argument]) -> str:
    """Say that there is no such argument, and what it is called here."""
    names = [p.name for p in own]
    here = [n for n in NAMES_ELSEWHERE.get(name, ()) if n in names]
    close = None if here else nearest(name, names)
    hint = f": here it is {' and '.join(here)}" if here else ""
    return f"there is no argument {name!r}{hint or (f'; did you mean {close!r}?' if close else '')}"


def _listed(own: Sequence[Argument]) -> str:
    """Return the arguments as in a call, with the defaults that are short."""
    parts: list[str] = []
    for p in own:
        if p.kind is Argument.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if p.kind in (Argument.VAR_POSITIONAL, Argument.VAR_KEYWORD):
            parts.append(f"{'*' if p.kind is Argument.VAR_POSITIONAL else '**'}{p.name}")
        elif p.default is Argument.empty:
            parts.append(p.name)
        else:
            shown = repr(p.default) if isinstance(p.default, _SHOWN) else "..."
            parts.append(f"{p.name}={shown}")
    return ", ".join(parts)


def name_constructor(cls: type) -> None:
    """Give a class that inherits `__init__` from a private one a copy with its own name.

    Python's TypeErrors then name the public class.
    """
    if INIT in cls.__dict__:
        return
    inherited = getattr(cls, INIT)
    if not isinstance(inherited, FunctionType) or not inherited.__qualname__.startswith("_"):
        return
    copy = FunctionType(
        inherited.__code__, inherited.__globals__, INIT,
        inherited.__defaults__, inherited.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__, copy.__doc__ = inherited.__kwdefaults__, inherited.__doc__
    copy.__annotations__, copy.__module__ = inherited.__annotations__, inherited.__module__
    copy.__qualname__ = f"{cls.__qualname__}.{INIT}"
    setattr(cls, INIT, copy)
