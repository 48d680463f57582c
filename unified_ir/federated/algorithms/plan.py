"""A module as the plan of a run, and a run's shared state as a module again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.algorithms.hyper import ANCHOR, HYPER, RATE
from triplane.unified_ir.federated.algorithms.objective import NEEDED, Objective, objective_of
from triplane.unified_ir.federated.algorithms.scaffold import CONTROL
from triplane.unified_ir.federated.algorithms.table import Algorithm, Hyper, algorithm
from triplane.unified_ir.federated.core.learn import shared
from triplane.unified_ir.ir import Function, Module, Role, StateTensor
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.meta import labels_of
from triplane.unified_ir.ir.module import with_assigned_state
from triplane.unified_ir.onnx import emit, serialize
from triplane.unified_ir.runtime import PlanSpec, write_plan

ENTRIES: Final = ("local_update", "adapt", "evaluate", "predict")
RESERVED: Final = (HYPER, ANCHOR, RATE, CONTROL)
ADAPT: Final = "adapt"
STEPS_KEY: Final = "adapt_steps"
"""Key of a module's meta: number of steps of its entry `adapt` in an adaptation."""
PRIVACY_KEY: Final = "privacy"
"""Key of a module's meta: what the run that made it spent, as JSON (`PrivacySpent`)."""
ALGORITHM_KEY: Final = "adapt_algorithm"


@dataclass(frozen=True, slots=True, eq=False)
class PlanMade:
    """A plan file. digest: its root digest. state: initial shared state; roles: of all state.

    frozen: shared tensors that learning does not move.
    """

    digest: str
    state: dict[str, Array]
    roles: dict[str, str]
    frozen: tuple[str, ...] = ()


def functions_of(module: Module, name: str, hyper: Hyper) -> dict[str, Function]:
    """Return the functions that a device runs, by entry."""
    row, of = algorithm(name), _objective(module)
    return {
        "local_update": row.step(of, hyper),
        "adapt": row.adapt(of),
        "evaluate": module.entry("evaluate"),
        "predict": module.entry("predict"),
    }


def functions_with_state(module: Module, name: str, hyper: Hyper) -> dict[str, Function]:
    """Return the functions that a device runs, each with the state that it assigns as results."""
    state = {**module.state, **_extra_state(algorithm(name), _objective(module), hyper)}
    by_entry = functions_of(module, name, hyper)
    return {k: with_assigned_state(f, state) for k, f in by_entry.items()}


def plan_of(
    module: Module, name: str, hyper: Hyper, path: str | Path, *, digest: str = ""
) -> PlanMade:
    """Write the plan of a run of algorithm `name`, whole or not at all.

    digest: the model's root digest. Personal state gets the value of `Module.initial`, with which
    the model was built, never a learned one. InvalidInput: this algorithm cannot learn the module;
    the message says why.
    """
    row, of = algorithm(name), _objective(module)
    extra_state = _extra_state(row, of, hyper)
    state = {**module.state, **extra_state}
    functions = functions_with_state(module, name, hyper)
    read = {p.name for f in functions.values() for p in f.params} & state.keys()
    # A device sets an anchor from the tensor itself, so the plan must hold that too, even if no
    # graph reads it.
    anchored = {n.removeprefix(ANCHOR) for n in read if n.startswith(ANCHOR)} & state.keys()
    used = sorted(read | anchored)
    roles = {n: str(state[n].role) for n in used}
    arrays = {n: state[n].array if n in extra_state else module.initial(n) for n in used}
    spec = PlanSpec(
        entries={k: serialize(emit(f)) for k, f in functions.items()},
        state=arrays,
        roles=roles,
        steps={ADAPT: hyper.inner_steps},
        labels=labels_of(module.meta),
        parent=digest,
    )
    plan_digest = write_plan(Path(path), spec)
    moved = functions["local_update"].result_names
    frozen = tuple(n for n in shared(roles) if n not in moved)
    return PlanMade(plan_digest, {n: arrays[n] for n in shared(roles)}, roles, frozen)


def module_of(
    module: Module,
    name: str,
    hyper: Hyper,
    state: Mapping[str, Array],
    *,
    meta: Mapping[str, str] | None = None,
) -> Module:
    """Return the module at a run's shared state, with the entry `adapt` that the run learned for.

    `adapt` takes one step on a batch, at the rates that are state of the module; the meta key
    `adapt_steps` has the number of steps. State of the algorithm that `adapt` does not read is left
    out. meta: further keys; `privacy` of the run that `module` came from does not stay, because it
    does not hold for what was learned since. InvalidInput: the state does not belong to such a run.
    """
    row, of = algorithm(name), _objective(module)
    extra_state = _extra_state(row, of, hyper)
    adapt = with_assigned_state(row.adapt(of), {**module.state, **extra_state})
    own = {k: v for k, v in module.state.items() if not k.startswith(RESERVED)}
    _check(state, own | extra_state)
    known = own | {k: v for k, v in extra_state.items() if k in adapt.param_names}
    after = {
        k: StateTensor(v.role, np.array(state[k])) if k in state else v for k, v in known.items()
    }
    entries = {e: f for e, f in module.entries.items() if e != ADAPT}
    functions = {f: module.functions[f] for f in dict.fromkeys(entries.values())}
    # An entry may share its function with others, so a function of that name may have to stay.
    candidates = (ADAPT, *(f"{ADAPT}{i}" for i in range(len(functions))))
    function = next(n for n in candidates if n not in functions)
    inherited = {k: v for k, v in module.meta.items() if k != PRIVACY_KEY}
    return Module(
        {**functions, function: adapt},
        {**entries, ADAPT: function},
        after,
        {**inherited, STEPS_KEY: str(hyper.inner_steps), ALGORITHM_KEY: name, **(meta or {})},
    )


def _objective(module: Module) -> Objective:
    of = objective_of(module)
    read = {p.name for e in NEEDED for p in module.entry(e).params}
    if clash := sorted(n for n in read if n.startswith(RESERVED)):
        raise InvalidInput(
            f"the model has state named {clash[0]!r}; names that begin with {', '.join(RESERVED)} "
            "are reserved for the state of a run, so rename the attribute"
        )
    return of


def _extra_state(row: Algorithm, of: Objective, hyper: Hyper) -> dict[str, StateTensor]:
    """Return state beside the module's; rates that an earlier run learned keep their values."""
    extra = row.state(of, hyper)
    if clash := sorted(n for n in extra.keys() & of.state.keys() if not n.startswith(RESERVED)):
        raise InvalidInput(
            f"the model has state named {clash[0]!r}, and so has the algorithm {row.name}; "
            "rename the attribute, or choose another algorithm"
        )
    for name, fresh in extra.items():
        earlier = of.state.get(name)
        if name.startswith(RATE) and earlier is not None and earlier.type == fresh.type:
            extra[name] = earlier
    return extra


def _check(state: Mapping[str, Array], known: Mapping[str, StateTensor]) -> None:
    for name, array in state.items():
        if name not in known or known[name].role is Role.PERSONAL:
            raise InvalidInput(f"{name!r} is not shared state of this model and algorithm")
        wanted = known[name].array
        if (array.dtype, array.shape) != (wanted.dtype, wanted.shape):
            raise InvalidInput(
                f"{name!r} is {wanted.dtype}{list(wanted.shape)}, got "
                f"{array.dtype}{list(array.shape)}"
            )
