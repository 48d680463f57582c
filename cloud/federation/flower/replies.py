"""Convert contributions of devices to Flower's replies. Runs in the strategy's process.

A device without a `ClientApp` contributes an update or a score as in any run. The bytes of a
`ClientApp`'s reply are not trusted: they are checked when they arrive, and a reply that does not
fit is refused with its kind and the reason before the strategy sees it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.cloud.federation.flower import adapter
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.files import Like, most_bytes, read_update
from triplane.unified_ir.federated.core.learn import buffers
from triplane.unified_ir.federated.core.limits import RoundUpdate, limited
from triplane.unified_ir.federated.core.metric import ACCURACY

LOSSES: Final = ("loss", "train_loss", "train-loss")
"""Names under which a ClientApp may report its loss."""
EXAMPLES: Final = "num-examples"
CLIPPING_TOLERANCE: Final = 1e-3
"""Share by which a float32 norm of many numbers may differ from ours in float64."""

Array = np.ndarray[Any, Any]
Contributed = tuple[dict[str, Array] | None, dict[str, Any]]
"""(arrays, or None after an evaluation; metrics)."""


def contributed(
    facts: Mapping[str, Any], order: Mapping[str, Any], like: Like, state: Mapping[str, Array]
) -> Contributed:
    """Return one device's reply: a score, its app's reply, or the shared state with its change."""
    if "metrics" in facts:
        return None, dict(facts["metrics"])
    if "samples" in facts:
        scores = {facts.get("metric", ACCURACY.name): facts["before"], "adapted": facts["after"]}
        return None, {EXAMPLES: facts["samples"], **scores}
    if order["app"]:
        return adapter.reply_contents(Path(facts["path"]).read_bytes())
    return learned(facts["examples"], facts["loss"], change_of(facts, order, like), state)


def limited_replies(
    answers: Mapping[str, Mapping[str, Any]],
    order: Mapping[str, Any],
    like: Like,
    state: Mapping[str, Array],
) -> tuple[dict[str, Contributed], int]:
    """Return replies of devices that learned by their plan, and how many updates were scaled.

    They are within the limits of the run: `norm_bound` and `max_examples` of the order.
    """
    updates = [
        RoundUpdate(
            facts["examples"],
            partial(change_of, facts, order, like),
            tuple(facts["norms"]) if facts["norms"] else None,
        )
        for facts in answers.values()
    ]
    bounded, scaled = limited(
        updates, norm_bound=order["norm_bound"], max_examples=order["max_examples"],
        buffers=frozenset(buffers(order["roles"])),
    )  # fmt: skip
    pairs = zip(answers.items(), bounded, strict=True)
    replies = {
        device: learned(update.examples, facts["loss"], update.open(), state)
        for (device, facts), update in pairs
    }
    return replies, scaled


def learned(
    examples: int, loss: float, change: Mapping[str, Array], state: Mapping[str, Array]
) -> Contributed:
    """Return the reply of a device with this change of the shared state."""
    # Flower's strategies expect new weights, whereas devices without an app send their change.
    arrays = {
        name: (state[name] + x).astype(state[name].dtype, copy=False) for name, x in change.items()
    }
    return arrays, {EXAMPLES: examples, "loss": loss, "train_loss": loss}


def change_of(facts: Mapping[str, Any], order: Mapping[str, Any], like: Like) -> dict[str, Array]:
    """Return the change in the file of an update."""
    return read_update(
        Path(facts["path"]), like, run=order["run"], lease=facts["lease"],
        max_bytes=most_bytes(like), buffers=buffers(order["roles"]),
    )  # fmt: skip


def checked(
    order: Mapping[str, Any], like: Like, clipping: adapter.Clipping | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an app's examples and loss, or why its reply is refused; and its metrics.

    clipping: the clipping that the strategy's privacy guarantee requires of the reply.
    """
    try:
        arrays, metrics = adapter.reply_contents(Path(order["path"]).read_bytes())
    except InvalidInput as error:
        return _refused("damaged", str(error)), {}
    answer = _judged(order, like, arrays, metrics)
    if "refused" not in answer and clipping is not None and arrays is not None:
        answer = _unclipped(clipping, arrays, metrics) or answer
    return answer, metrics


def _judged(
    order: Mapping[str, Any],
    like: Like,
    arrays: Mapping[str, Array] | None,
    metrics: Mapping[str, Any],
) -> dict[str, Any]:
    examples = metrics.get(EXAMPLES)
    if not isinstance(examples, int) or not 1 <= examples <= order["examples"]:
        wanted = f"1 to {order['examples']} {EXAMPLES}"
        return _refused("figures", f"a reply has {wanted}, got {examples!r:.80}")
    if not order["evaluates"] and (why := _unfit(arrays, like)):
        return why
    losses = (metrics.get(name) for name in LOSSES)
    numbers_ = (float(x) for x in losses if isinstance(x, int | float))
    return {"examples": examples, "loss": next(filter(math.isfinite, numbers_), None)}


def _unclipped(
    clipping: adapter.Clipping, arrays: Mapping[str, Array], metrics: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return why differential privacy does not hold with this reply, or None if it does.

    The noise is calibrated to changes of at most the clipping norm. A mod on the device clips them;
    this checks that it did, up to the rounding error of adding the change to the arrays.
    """
    mod = "adaptiveclipping_mod" if clipping.adaptive else "fixedclipping_mod"
    mend = f"add Flower's mod to the device's app: ClientApp(mods=[{mod}])"
    if clipping.adaptive and adapter.NORM_BIT not in metrics:
        return _refused("clipping", f"the reply has no metric {adapter.NORM_BIT!r}; {mend}")
    if arrays.keys() != clipping.arrays.keys():
        return _refused("names", "a clipped reply must have the arrays that were sent")
    # In float64: a sum of many float32 squares would itself lose more than the tolerance.
    changed = rounding = 0.0
    for name, sent in clipping.arrays.items():
        before, after = sent.astype(np.float64), arrays[name].astype(np.float64)
        changed += float(np.square(after - before).sum())
        eps = float(np.finfo(arrays[name].dtype).eps)
        rounding += float(np.square(eps * np.maximum(abs(before), abs(after))).sum())
    norm = math.sqrt(changed)
    if norm <= clipping.norm * (1 + CLIPPING_TOLERANCE) + math.sqrt(rounding):
        return None
    return _refused(
        "clipping",
        f"the reply changes the arrays by {norm:.4g} (L2 norm), the strategy clips at "
        f"{clipping.norm:.4g}: without clipping its privacy guarantee does not hold; {mend}",
    )


def common(all_metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the finite metrics that every reply has.

    Flower's aggregation fails if replies differ in their metrics, so others are left out.
    """
    named = [set(numbers(metrics)) for metrics in all_metrics]
    return sorted(set.intersection(*named)) if named else []


def numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the finite numbers among metrics, for people."""
    return {
        str(name): float(value)
        for name, value in (metrics or {}).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _unfit(arrays: Mapping[str, Array] | None, like: Like) -> dict[str, Any] | None:
    """Return why these arrays do not match those that were sent, or None."""
    if arrays is None or arrays.keys() != like.keys():
        return _refused("names", "a reply to train must have the arrays that were sent")
    for name, (_, shape) in like.items():
        array = arrays[name]
        if (array.shape, array.dtype.kind) != (shape, "f"):
            actual = f"{array.dtype}{array.shape}"
            return _refused("shape", f"{name!r} is float{shape}, but {actual} in the reply")
        if not np.isfinite(array).all():
            return _refused("nonfinite", f"{name!r} has NaN or infinity")
    return None


def _refused(kind: str, text: str) -> dict[str, Any]:
    return {"refused": kind, "text": text}
