"""The interface of optimizers: an initial state, and one update written in operators.

The state consists of tensors with their own names beside the parameters: `optimizer.SLOT.PATH` for
each slot of the parameter PATH, and `optimizer.step`, an int64 scalar that counts updates, where an
update depends on that number. The optimizer object holds no arrays and can train any model.

An update is computed in float32, and so are the slots of a parameter of float16 or bfloat16, since
a square of a small gradient is 0 there and Adam would divide by it; the result is rounded to the
parameter's type. Parameters of float64 are updated in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Final, Literal, Self, TypeVar, get_args, overload

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir.frontend.arguments import ArgumentError, check_arguments
from triplane.unified_ir.frontend.binding import Parameter, current, holding
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.frontend.run import run
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import DType, TensorType, float32, float64, int64, type_of
from triplane.unified_ir.ops.recorder import recording
from triplane.unified_ir.ops.tensor import Tensor, as_tensor
from triplane.unified_ir.optim import plateau
from triplane.unified_ir.optim.group import Group
from triplane.unified_ir.optim.schedules import COMPUTED, Constant, Schedule

STEP: Final = "optimizer.step"
"""State: the number of updates done, int64 scalar."""

C = TypeVar("C", bound=Cell)
Slots = Mapping[str, Tensor]
Moved = tuple[Tensor, dict[str, Tensor]]
Rule = Callable[[Tensor, Tensor, Slots], Moved]
"""(parameter, its gradient, its slots) -> the next parameter and slots."""

Checks = Mapping[str, Callable[[str, str, float], None]]
"""By option: a function of (optimizer's name, option, value) that refuses invalid values."""

Decay = Literal["coupled", "decoupled"]
"""Where weight decay enters: in the gradient ("coupled"), or directly in the parameter."""
DECAYS: Final[tuple[str, ...]] = get_args(Decay)


def slot_name(slot: str, path: str) -> str:
    """Return the state name of a parameter's slot."""
    return f"optimizer.{slot}.{path}"


def computed_type(param: TensorType) -> TensorType:
    """Return the type in which a parameter of this type is updated."""
    return param if param.dtype == float64 else param.with_dtype(float32)


def check_range(owner: str, name: str, value: float, low: float, high: float) -> None:
    """Refuse a value that is not in low <= value < high."""
    if not low <= value < high:
        raise InvalidInput(f"{owner} needs {name} in [{low:g}, {high:g}), got {value}")


def check_positive(owner: str, name: str, value: float) -> None:
    """Refuse a value that is not positive and finite."""
    if not 0 < value < math.inf:
        raise InvalidInput(f"{owner} needs {name} > 0, got {value}")


WAYS_OUT: Final = {
    "gradient": "take grads from value_and_grad of these parameters",
    "state": "start with state = optimizer.init(params), and keep one state for each optimizer",
}
SHARE: Final = partial(check_range, low=0, high=1)
NOT_NEGATIVE: Final = partial(check_range, low=0, high=math.inf)


@dataclass(frozen=True)
class Optimizer:
    """A rule that moves each parameter by its gradient and its slots.

    lr: a number, or a schedule over the number of updates done before this one.
    weight_decay: w; coupled adds w p to the gradient, decoupled multiplies p by 1 - lr w first
    (Loshchilov and Hutter 2019). groups: other options by parameter, see `Group`.
    """

    lr: float | Schedule
    weight_decay: float = field(default=0.0, kw_only=True)
    decay: Decay = field(default="coupled", kw_only=True)
    groups: tuple[Group, ...] = field(default=(), kw_only=True)

    slots: ClassVar[tuple[str, ...]] = ()
    checks: ClassVar[Checks] = {}
    """Checks of a subclass's own options, by name."""
    counts_always: ClassVar[bool] = False
    """Whether an update depends on the number of updates even if the rate is constant."""
    decays_in_rule: ClassVar[bool] = False
    """Whether `rule` applies decoupled weight decay itself."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return the object without fields; ArgumentError for arguments that do not fit."""
        advice = f"the trainer finds the parameters itself: optim.{cls.__name__}(lr=0.001)"
        check_arguments(cls, args, kwargs, advice=advice)
        if args and not isinstance(args[0], (Real, Schedule, str)):
            raise ArgumentError(
                f"the first argument of {cls.__name__} is the learning rate, got a "
                f"{type(args[0]).__name__}; {advice}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        name = type(self).__name__
        lr: Any = self.lr
        is_number = isinstance(lr, Real) and not isinstance(lr, bool)
        if not isinstance(lr, Schedule) and not (is_number and 0 <= lr < math.inf):
            raise InvalidInput(f"a learning rate must be a schedule or finite and >= 0, got {lr!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise InvalidInput(f"{name} needs weight_decay >= 0, got {self.weight_decay}")
        check_choice(f"{name}'s decay", self.decay, DECAYS)
        for option, check in self.checks.items():
            check(name, option, getattr(self, option))
        object.__setattr__(self, "groups", tuple(self.groups))
        for group in self.groups:
            self._with_options(group)

    def used_slots(self) -> tuple[str, ...]:
        """Return the slots in use; a parameter may lack some, see `slot_types`."""
        return self.slots

    def slot_types(self, param: TensorType) -> dict[str, TensorType]:
        """Return the types of the slots of a parameter of this type."""
        return dict.fromkeys(self.used_slots(), param)

    def slot_start(self, slot: str) -> float:
        """Return the number that fills a slot before the first update."""
        return 0.0

    def counts(self) -> bool:
        """Return whether an update depends on the number of updates before it.

        If so, `optimizer.step` is part of the state.
        """
        changes = isinstance(self.lr, Schedule) and not isinstance(self.lr, Constant)
        return changes or self.counts_always

    def frozen(self, paths: Collection[str]) -> frozenset[str]:
        """Return those of `paths` that a group freezes."""
        return frozenset(p for p in paths if (g := self._group(p)) is not None and g.frozen)

    def freezing(self) -> tuple[Group, ...]:
        """Return groups that state only which parameters are frozen, for another optimizer."""
        return tuple(g if g.frozen else Group(g.pattern) for g in self.groups)

    def of(self, path: str) -> Self:
        """Return this optimizer for one parameter: with its group's options and without groups."""
        group = self._group(path)
        return replace(self, groups=()) if group is None else self._with_options(group)

    def state_types(self, params: Mapping[str, TensorType]) -> dict[str, TensorType]:
        """Return the types of the state for parameters by path."""
        idle = [g.pattern for g in self.groups if not any(map(g.holds, params))]
        if idle and params:  # probably a typing error
            raise InvalidInput(
                f"group {idle[0]!r} matches no trained parameter; there are {', '.join(params)}"
            )
        chosen = self._chosen(params)
        if whole := [path for path in chosen if not params[path].dtype.is_float]:
            raise InvalidInput(  # an update rounded to it would move the parameter wrongly
                f"an optimizer moves floating-point parameters, but {whole[0]!r} is "
                f"{params[whole[0]]}; cast it, or freeze it with optim.Group({whole[0]!r}, "
                "frozen=True)"
            )
        types = {STEP: TensorType(int64, ())} if any(o.counts() for o in chosen.values()) else {}
        types |= dict.fromkeys(self.plateaus(), TensorType(float32, ()))
        names = dict.fromkeys(slot for o in chosen.values() for slot in o.used_slots())
        kept = {path: o.slot_types(computed_type(params[path])) for path, o in chosen.items()}
        for slot in names:
            types |= {slot_name(slot, p): t[slot] for p, t in kept.items() if slot in t}
        return types

    def init(self, params: Mapping[str, Array] | Cell) -> dict[str, Array]:
        """Return the initial state for arrays by path, or for a cell's trainable parameters."""
        _check_parameters(params)
        params = params.trainable_state() if isinstance(params, Cell) else params
        types = self.state_types({path: type_of(p) for path, p in params.items()})
        starts = {
            slot_name(slot, path): one.slot_start(slot)
            for path, one in self._chosen(params).items()
            for slot in one.used_slots()
        }
        starts |= {name: schedule.start for name, schedule in self.plateaus().items()}
        return {
            name: np.full(t.concrete({}), starts.get(name, 0), t.dtype.numpy)
            for name, t in types.items()
        }

    @overload
    def update(
        self, params: C, grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[C, dict[str, Any]]: ...
    @overload
    def update(
        self, params: Mapping[str, Any], grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def update(self, params: Any, grads: Any, state: Any) -> tuple[Any, dict[str, Any]]:
        """Return (next parameters, next state) of one update; the arguments are not changed.

        params, grads: tensors or arrays by path. For a cell, its trainable parameters take their
        next values and the cell itself is returned. state: what `init` or the last update returned.
        Parameters that a group freezes stay as they are. In a function decorated with `graph` the
        update is a part of its graph; called with arrays it is one compiled program.
        InvalidInput: paths or types of gradients or state do not fit the parameters.

        >>> from triplane.unified_ir import optim
        >>> sgd, params = optim.SGD(0.5), {"w": np.ones(2, np.float32)}
        >>> sgd.update(params, {"w": np.ones(2, np.float32)}, sgd.init(params))
        ({'w': array([0.5, 0.5], dtype=float32)}, {})
        """
        _check_parameters(params)
        for what, values in (("gradient", grads), ("state", state)):
            if not isinstance(values, Mapping):
                raise InvalidInput(
                    f"the {what} is a dict of arrays by name, got a {type(values).__name__}; "
                    f"{WAYS_OUT[what]}"
                )
        if isinstance(params, Cell):
            return params, _recorded_or_run(self._update_cell, params, grads, state)
        return _recorded_or_run(self._update_mapping, params, grads, state)  # type: ignore[no-any-return]

    def _update_cell(
        self, cell: Cell, grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        binding = current()
        own = {path: p for path, p in cell.parameters().items() if p.trainable}
        if not own:
            raise InvalidInput(
                f"{type(cell).__name__} has no trainable parameter to update; unfreeze() some, or "
                "leave the update out"
            )
        params = {path: binding.read(p) for path, p in own.items()}
        gradients, before = self._fitting(params, grads, state)
        moved, kept = self.record_update(params, gradients, before)
        for path, tensor in moved.items():
            binding.replace(f"parameter {path!r}", own[path], tensor)
        # What an update only reads, such as the rate of a `ReduceOnPlateau`, is state as well.
        return before | kept

    def _update_mapping(
        self, params: Mapping[str, Any], grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        tensors = {path: as_tensor(p) for path, p in params.items()}
        gradients, before = self._fitting(tensors, grads, state)
        moved, kept = self.record_update(tensors, gradients, before)
        return tensors | moved, before | kept

    def _fitting(
        self, params: Mapping[str, Tensor], grads: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return gradients and state as tensors of the types that the parameters ask for."""
        types = {path: p.type for path, p in params.items()}
        moved = {path: t for path, t in types.items() if path not in self.frozen(types)}
        unknown = sorted(grads.keys() - types.keys())
        if unknown:
            raise InvalidInput(
                f"there is a gradient of {unknown[0]!r}, but no such parameter; the parameters are "
                f"{', '.join(types)}"
            )
        return (
            _as_tensors("gradient", moved, {k: g for k, g in grads.items() if k in moved}),
            _as_tensors("state", self.state_types(types), state),
        )

    def record_update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Record one update in the graph under construction; return next parameters and state.

        Frozen parameters have no gradient and no result.
        """
        step = state.get(STEP)
        moved: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {} if step is None else {STEP: step + 1}
        rules: dict[tuple[Group | None, DType], Rule] = {}
        for path, one in self._chosen(params).items():
            computed = computed_type(params[path].type)
            key = self._group(path), computed.dtype
            # One rule per group, so that the scalars of schedules and bias corrections are recorded
            # once and not for every parameter.
            if key not in rules:
                with plateau.reading(self.plateaus(), state), holding(COMPUTED, computed.dtype):
                    rules[key] = one.rule_with_decay(step)
            slots = {s: state[slot_name(s, path)] for s in one.slot_types(computed)}
            p, g = (x.cast(computed.dtype) for x in (params[path], grads[path]))
            after, own = rules[key](p, g, slots)
            moved[path] = after.cast(params[path].dtype)
            kept |= {slot_name(s, path): x for s, x in own.items()}
        return moved, kept

    def rule(self, step: Tensor | None) -> Rule:
        """Return the update of one parameter; it takes parameter and gradient after weight decay.

        Scalars that depend on `step` are computed here, once for all parameters. Parameter,
        gradient and slots are of float32, those of a float64 parameter of float64.
        """
        raise NotImplementedError

    def rule_with_decay(self, step: Tensor | None) -> Rule:
        """Return `rule` after weight decay."""
        rule, decay = self.rule(step), self.weight_decay
        if not decay or self.decoupled_in_rule():
            return rule
        if self.decay == "coupled":
            return lambda p, g, slots: rule(p, g + p * decay, slots)
        # Loshchilov and Hutter 2019: the decay scales with the rate, as in PyTorch's AdamW.
        shrink = 1.0 - self.rate(step) * decay
        return lambda p, g, slots: rule(p * shrink, g, slots)

    def decoupled_in_rule(self) -> float:
        """Return the weight decay that `rule` has to apply itself, else 0."""
        return self.weight_decay * (self.decays_in_rule and self.decay == "decoupled")

    def rate(self, step: Tensor | None) -> Tensor | float:
        """Return the learning rate of this update; a plain number where it never changes."""
        if isinstance(self.lr, Constant):
            return float(self.lr.value)
        if isinstance(self.lr, Schedule):
            assert step is not None
            return self.lr(step).cast(COMPUTED.get())
        return float(self.lr)

    def rate_at(self, updates: int, state: Mapping[str, Array] | None = None) -> float:
        """Return the learning rate after that many updates, for parameters in no group.

        state: the optimizer's, which a `ReduceOnPlateau` needs.
        """
        if not isinstance(self.lr, Schedule):
            return float(self.lr)
        rates: dict[Schedule, float] = {
            schedule: float((state or {}).get(name, schedule.start))
            for name, schedule in self.plateaus().items()
        }
        return self.lr.at(updates, rates)

    def plateaus(self) -> dict[str, plateau.ReduceOnPlateau]:
        """Return each schedule that depends on measures under the name of its state."""
        options = [dict(g.options) for g in self.groups]
        return plateau.named([self.lr, *(o["lr"] for o in options if "lr" in o)])

    def _group(self, path: str) -> Group | None:
        return next((g for g in self.groups if g.holds(path)), None)

    def _with_options(self, group: Group) -> Self:
        known = {f.name for f in fields(self)} - {"groups"}
        odd = [k for k, _ in group.options if k not in known]
        if odd:
            raise InvalidInput(
                f"group {group.pattern!r} sets {odd[0]!r}, which is no option of "
                f"{type(self).__name__}; it has {', '.join(sorted(known))}"
            )
        return replace(self, groups=(), **dict(group.options))

    def _chosen(self, paths: Collection[str]) -> dict[str, Self]:
        """Return the optimizer of each parameter that is not frozen."""
        frozen = self.frozen(paths)
        return {path: self.of(path) for path in paths if path not in frozen}


def _check_parameters(params: Any) -> None:
    """Refuse anything but a cell or a mapping of arrays by path."""
    if isinstance(params, Cell):
        return
    if not isinstance(params, Mapping):
        raise InvalidInput(
            "parameters are a cell or a dict of arrays by path, got a "
            f"{type(params).__name__}; each cell has its own gradients and state, so call this for "
            "each cell"
        )
    if odd := [path for path, p in params.items() if isinstance(p, (Parameter, Mapping))]:
        raise InvalidInput(
            f"parameters are arrays by path, but {odd[0]!r} is a {type(params[odd[0]]).__name__}; "
            "pass the cell itself, or its trainable_state()"
        )
    if odd := [path for path, p in params.items() if not hasattr(p, "dtype")]:
        raise InvalidInput(
            f"parameters are arrays by path, but {odd[0]!r} is a {type(params[odd[0]]).__name__}; "
            "pass np.asarray(...)"
        )


def _recorded_or_run(method: Callable[..., Any], *args: Any) -> Any:
    return method(*args) if recording() else run(method, args, {})


def _as_tensors(
    what: str, types: Mapping[str, TensorType], values: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return tensors of exactly these names and types."""
    way_out = WAYS_OUT[what]
    for names, lack in (
        (types.keys() - values.keys(), "lacks"),
        (values.keys() - types.keys(), "has, without a parameter that needs it,"),
    ):
        if names:
            raise InvalidInput(f"the {what} {lack} {min(names)!r}; {way_out}")
    tensors = {name: as_tensor(values[name]) for name in types}
    for name, type_ in types.items():
        seen = tensors[name].type
        if seen != type_:
            if (type_.dtype, seen) == (float64, type_.with_dtype(float32)):
                way_out = 'a call converts float64 arrays, unless mode("graph", floats="float64")'
            raise InvalidInput(f"the {what} {name!r} must be {type_}, got {seen}; {way_out}")
    return tensors
