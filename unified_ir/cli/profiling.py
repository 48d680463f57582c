"""`triplane inspect --profile`: measure where one entry spends its time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput

if TYPE_CHECKING:
    from triplane.unified_ir.ir import Module, TensorType

DEFAULT_SIZE: Final = 32
"""Value of a symbolic size that --sizes does not give."""
SHOWN: Final = 12
"""Number of rows of each table in the text output; --json has all rows."""


def sizes_of(_: click.Context, param: click.Parameter, value: str | None) -> dict[str, int]:
    """Parse the value of --sizes, such as N=32,T=10; a callback of click."""
    sizes: dict[str, int] = {}
    for part in value.split(",") if value else ():
        name, sign, size = part.partition("=")
        if not sign or not name.strip() or not size.strip().isdecimal() or int(size) < 1:
            raise click.BadParameter(
                f"sizes must have the form N=32,T=10 with whole numbers >= 1, got {part!r}",
                param=param,
            )
        sizes[name.strip()] = int(size)
    return sizes


def known_sizes(name: str, types: Iterable[TensorType], sizes: Iterable[str]) -> set[str]:
    """Return the symbols of an entry's inputs; InvalidInput if `sizes` names another."""
    known = {s for t in types for s in t.symbols}
    if odd := sorted(set(sizes) - known):
        raise InvalidInput(f"the inputs of {name} have the sizes {sorted(known)}, but not {odd}")
    return known


def entry_profile(module: Module, entry: str | None, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Profile one entry on random inputs and the state of the file; return a JSON record.

    Without `entry`, it is `train_step` if the module has it, else the first entry. InvalidInput:
    `sizes` names a symbol that the inputs do not have.
    """
    from triplane.unified_ir.engines.profile import profiled, sample_inputs

    name = entry or ("train_step" if "train_step" in module.entries else next(iter(module.entries)))
    function = module.entry(name)
    types = {p.name: p.type for p in module.inputs(name)}
    known = known_sizes(name, types.values(), sizes)
    args = sample_inputs(types, sizes, default=DEFAULT_SIZE)
    read = [p.name for p in function.params if p.name in module.state]
    # `initial`, because a file has no values for personal state.
    args |= {k: module.initial(k) for k in read}
    # An entry that changes its state is timed as in training, with the state in the session's
    # buffers.
    state = read if module.assigned(name) else []
    profile = profiled(function, args, state=state)
    used = {s: sizes.get(s, DEFAULT_SIZE) for s in sorted(known)}
    return {
        "entry": name,
        "sizes": used,
        "total_ms": profile.total_ms,
        "calls": profile.calls,
        **{k: [asdict(s) for s in getattr(profile, k)] for k in ("nodes", "ops", "lines")},
    }


def profile_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """Format the record of `entry_profile` as text."""
    sizes = ", ".join(f"{k}={v}" for k, v in record["sizes"].items())
    at = f" at {sizes}" if sizes else ""
    yield f"{record['entry']}{at}: {record['total_ms']:.3f} ms a call, median of {record['calls']}"
    yield "shares are from onnxruntime's profile of the same graph; integer inputs are 0"
    for kind in ("nodes", "ops", "lines"):
        rows = record[kind]
        yield ""
        yield f"by {kind.removesuffix('s')}"
        for row in rows[:SHOWN]:
            yield _row_text(row, kind)
        if len(rows) > SHOWN:
            rest = sum(r["share"] for r in rows[SHOWN:])
            yield f"  {rest:6.1%}  {len(rows) - SHOWN} more"


def _row_text(row: Mapping[str, Any], kind: str) -> str:
    head = f"  {row['share']:6.1%}  {row['ms']:9.3f} ms  x{row['runs']:<5.4g} {row['what']}"
    if kind != "nodes":
        return head
    scope = f" in {row['scope']}" if row["scope"] else ""
    return f"{head}  {row['line']}{scope}".rstrip()
