"""What devices contributed to a strategy's turn, as Flower's replies; in the strategy's process.

A device without a `ClientApp` contributed an update or a score as in any run. The bytes of a
`ClientApp`'s reply come from a stranger: they are checked when they arrive, so that what does not
fit is refused with a word and the strategy never sees it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.cloud.federation import flower
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.files import Like, most_bytes, read_update
from triplane.unified_ir.federated.core.learn import buffers

LOSSES: Final = ("loss", "train_loss", "train-loss")
"""Metrics of a ClientApp that may say how well it learned."""
EXAMPLES: Final = "num-examples"

Array = np.ndarray[Any, Any]
Contributed = tuple[dict[str, Array] | None, dict[str, Any]]
"""(arrays, or None after an evaluation; metrics)."""


def contributed(
    facts: Mapping[str, Any], order: Mapping[str, Any], like: Like, state: Mapping[str, Array]
) -> Contributed:
    """Of one device: a score, a reply of its app, or the shared state and its change."""
    if "metrics" in facts:
        return None, dict(facts["metrics"])
    if "samples" in facts:
        accuracies = {"accuracy": facts["before"], "adapted": facts["after"]}
        return None, {EXAMPLES: facts["samples"], **accuracies}
    if order["app"]:
        return flower.replied(Path(facts["path"]).read_bytes())
    change = read_update(
        Path(facts["path"]), like, run=order["run"], lease=facts["lease"],
        max_bytes=most_bytes(like), buffers=buffers(order["roles"]),
    )  # fmt: skip
    arrays = {name: state[name] + change[name] for name in like}
    return arrays, {EXAMPLES: facts["examples"], "loss": facts["loss"], "train_loss": facts["loss"]}


def checked(order: Mapping[str, Any], like: Like) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what an app's reply says of itself, or the word and sentence it is refused by; metrics)."""
    try:
        arrays, metrics = flower.replied(Path(order["path"]).read_bytes())
    except InvalidInput as error:
        return _refused("damaged", str(error)), {}
    return _judged(order, like, arrays, metrics), metrics


def _judged(
    order: Mapping[str, Any],
    like: Like,
    arrays: Mapping[str, Array] | None,
    metrics: Mapping[str, Any],
) -> dict[str, Any]:
    examples = metrics.get(EXAMPLES)
    if not isinstance(examples, int) or not 1 <= examples <= order["examples"]:
        wanted = f"1 to {order['examples']} {EXAMPLES}"
        return _refused("figures", f"a reply is of {wanted}, got {examples!r:.80}")
    if not order["evaluates"] and (why := _unfit(arrays, like)):
        return why
    losses = (metrics.get(name) for name in LOSSES)
    numbers_ = (float(x) for x in losses if isinstance(x, int | float))
    return {"examples": examples, "loss": next(filter(math.isfinite, numbers_), None)}


def common(all_metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of finite numbers that every reply tells: one odd reply must not spoil the rest."""
    named = [set(numbers(metrics)) for metrics in all_metrics]
    return sorted(set.intersection(*named)) if named else []


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The finite numbers among metrics, for people."""
    return {
        str(name): float(value)
        for name, value in (metrics or {}).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _unfit(arrays: Mapping[str, Array] | None, like: Like) -> dict[str, Any] | None:
    """Why these are not the arrays that were sent, changed."""
    if arrays is None or arrays.keys() != like.keys():
        return _refused("names", "a reply to train holds the arrays that were sent")
    for name, (_, shape) in like.items():
        array = arrays[name]
        if (array.shape, array.dtype.kind) != (shape, "f"):
            found = f"{array.dtype}{array.shape}"
            return _refused("shape", f"{name!r} is float{shape} here, replied is {found}")
        if not np.isfinite(array).all():
            return _refused("nonfinite", f"{name!r} holds numbers that are not finite")
    return None


def _refused(kind: str, text: str) -> dict[str, Any]:
    return {"refused": kind, "text": text}
