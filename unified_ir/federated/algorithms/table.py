"""The algorithms, one row each. They differ in the graph of a step and in the cloud's optimizer.

A row is the whole algorithm: commands, wire format, cloud and report take its name, its
hyperparameters and the server's optimizer from here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.algorithms import scaffold, steps
from triplane.unified_ir.federated.algorithms.hyper import (
    ANCHOR,
    DECAY,
    HYPER,
    INNER_STEPS,
    LR,
    META_LR,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    Hyperparameter,
    HyperRule,
)
from triplane.unified_ir.federated.algorithms.objective import Objective
from triplane.unified_ir.federated.algorithms.steps import shared_trained
from triplane.unified_ir.federated.core.reduce import ADAM, MOMENTUM, SGD, ServerOptimizer
from triplane.unified_ir.ir import Function, Role, StateTensor

Gradient = Callable[[Objective, int], Function]
ExtraState = Callable[[Objective, "Hyper"], Mapping[str, StateTensor]]


class Hyper(Mapping[str, float]):
    """Values of the hyperparameters of all algorithms, by name; `hyper.lr` is `hyper["lr"]`.

    Values that are not given have their defaults. InvalidInput: a value is out of its range, or no
    algorithm declares the name.
    """

    __slots__ = ("_values",)

    def __init__(self, **values: float) -> None:
        # Those of all algorithms, not of one: a message on the wire has one field for each.
        declared = hyperparameters()
        if unknown := sorted(values.keys() - declared.keys()):
            raise InvalidInput(
                f"no algorithm has a hyperparameter {unknown[0][:80]!r}; there are "
                f"{', '.join(declared)}"
            )
        self._values = {name: values.get(name, row.default) for name, row in declared.items()}
        for name, row in declared.items():
            row.check(self._values[name])

    @property
    def inner_steps(self) -> int:
        """Steps of adaptation."""
        return int(self["inner_steps"])

    def but(self, **changes: float) -> Hyper:
        """Return these values with some changed."""
        return Hyper(**{**self._values, **changes})

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __getattr__(self, name: str) -> float:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return f"Hyper({', '.join(f'{name}={value!r}' for name, value in self.items())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One federated algorithm.

    summary: a few words for help. episodes: a step takes support and query instead of one batch.
    weighting: of updates, by "examples" or "equal". server: the cloud's optimizer. gradient: the
    direction of a step, for a number of inner steps. hyper: the hyperparameters; each is also state
    that the graphs may read. rate: the hyperparameter that multiplies a step. adapt: one step of
    adaptation. extra_state: further state beside the module's. by_share: prefix of shared buffers
    whose mean change counts by the share of all devices that took part in the round. revision: a
    digest of code that the graphs do not show; a study is not resumed with another one.
    """

    name: str
    source: str
    summary: str
    episodes: bool
    weighting: str
    gradient: Gradient
    hyper: tuple[Hyperparameter, ...]
    server: ServerOptimizer = SGD
    rate: str = LR
    adapt: Callable[[Objective], Function] = steps.plain_adapt
    extra_state: ExtraState = lambda _of, _hyper: {}
    by_share: str = ""
    revision: str = ""

    @property
    def learns_rates(self) -> bool:
        """Whether adaptation uses learned rates instead of `hyper.lr`."""
        return self.adapt is steps.learned_rate_adapt

    def shares(
        self, hyper: Mapping[str, float], names: Iterable[str], *, updates: int, members: int
    ) -> dict[str, float]:
        """Return the factors of the mean changes of a round, by tensor.

        members: devices that can learn, which `population_size` replaces if it is set.
        """
        if not self.by_share:
            return {}
        share = min(1.0, updates / (hyper["population_size"] or max(members, updates)))
        return {name: share for name in names if name.startswith(self.by_share)}

    def step(self, of: Objective, hyper: Hyper) -> Function:
        """Return the entry `local_update`."""
        gradient = self.gradient(of, hyper.inner_steps)
        if not isinstance(gradient, Function):
            raise InvalidInput(
                f"the gradient of {self.name} must be a Function, got {type(gradient).__name__}"
            )
        return steps.descent(gradient, self.rate, "local_update")

    def state(self, of: Objective, hyper: Hyper) -> dict[str, StateTensor]:
        """Return the state beside the module's: hyperparameters as numbers, and `extra_state`."""
        dtype = steps.scalar_of(of).dtype.numpy
        numbers = {HYPER + row.name: np.asarray(hyper[row.name], dtype) for row in self.hyper}
        scalars = {name: StateTensor(Role.BUFFER, number) for name, number in numbers.items()}
        return {**scalars, **self.extra_state(of, hyper)}


def _anchors(of: Objective, _hyper: Hyper) -> dict[str, StateTensor]:
    # Overwritten on the device at the start of every round (`core.learn`).
    return {
        ANCHOR + p: StateTensor(Role.BUFFER, of.state[p].array.copy()) for p in shared_trained(of)
    }


def _own_rates(of: Objective, hyper: Hyper) -> dict[str, StateTensor]:
    """Return the initial rates of Meta-SGD: `lr` everywhere."""
    arrays = {RATE + p: np.full_like(of.state[p].array, hyper.lr) for p in of.trained}
    return {name: StateTensor(Role.PARAMETER, array) for name, array in arrays.items()}


# fmt: off
_SHARED: Final = (
    Hyperparameter("lr", 0.05, NOT_NEGATIVE, "Rate of a device's steps, and of adaptation."),
    Hyperparameter("inner_steps", 3, INNER_STEPS, "Steps of an adaptation."),
)
_SERVER_LR: Final = Hyperparameter("server_lr", 1.0, POSITIVE, "Rate of the cloud's optimizer.")
_ADAM: Final = (
    replace(_SERVER_LR, default=0.03),
    Hyperparameter("beta1", 0.9, DECAY, "Decay of Adam's first moment on the cloud."),
    Hyperparameter("beta2", 0.99, DECAY, "Decay of Adam's second moment on the cloud."),
    Hyperparameter("floor", 1e-3, POSITIVE, "Added to the root of the second moment."),
)
_META_LR: Final = Hyperparameter("meta_lr", 0.05, NOT_NEGATIVE, "Rate of a device's meta-steps.")

_ROWS: Final = (
    Algorithm(
        name="fedavg", source="McMahan et al. 2017, arXiv 1602.05629, algorithm 1",
        summary="local steps, averaged",
        episodes=False, weighting="examples", gradient=steps.batch_gradient,
        hyper=(*_SHARED, _SERVER_LR),
    ),
    Algorithm(
        name="fedprox", source="Li et al. 2020, arXiv 1812.06127, algorithm 2",
        summary="as fedavg, and held near the round's start",
        episodes=False, weighting="examples", gradient=steps.proximal_gradient,
        extra_state=_anchors,
        hyper=(
            *_SHARED, _SERVER_LR,
            Hyperparameter("proximal", 0.01, NOT_NEGATIVE, "Weight of FedProx's distance."),
        ),
    ),
    Algorithm(
        name="fedadam", source="Reddi et al. 2021, arXiv 2003.00295, algorithm 2",
        summary="as fedavg, with Adam on the cloud",
        episodes=False, weighting="examples", gradient=steps.batch_gradient, server=ADAM,
        hyper=(*_SHARED, *_ADAM),
    ),
    Algorithm(
        name="fedavgm", source="Hsu et al. 2019, arXiv 1909.06335, section 4.1",
        summary="as fedavg, with momentum on the cloud",
        episodes=False, weighting="examples", gradient=steps.batch_gradient, server=MOMENTUM,
        hyper=(
            *_SHARED, _SERVER_LR,
            Hyperparameter("momentum", 0.9, DECAY, "Decay of the momentum on the cloud."),
        ),
    ),
    Algorithm(
        name="scaffold",
        source="Karimireddy et al. 2020, arXiv 1910.06378, algorithm 1, option II",
        summary="as fedavg, with control variates against the drift of devices",
        episodes=False, weighting="equal", gradient=scaffold.controlled_gradient,
        extra_state=scaffold.control_variates, by_share=scaffold.CONTROL,
        hyper=(
            *_SHARED, _SERVER_LR,
            Hyperparameter(
                "population_size", 0, HyperRule("a whole number, not negative", whole=True),
                "Devices of the population, for SCAFFOLD; 0: those that have joined.",
            ),
        ),
    ),
    Algorithm(
        name="maml",
        source="Chen et al. 2018, arXiv 1802.07876; Finn et al. 2017, arXiv 1703.03400",
        summary="a start from which --inner-steps steps on --support samples lead far (exact)",
        episodes=True, weighting="equal", gradient=steps.meta_gradient, rate=META_LR,
        hyper=(*_SHARED, _SERVER_LR, _META_LR),
    ),
    Algorithm(
        name="fomaml", source="Finn et al. 2017, arXiv 1703.03400, section 5.2",
        summary="as maml, to first order",
        episodes=True, weighting="equal", gradient=steps.first_order_gradient, rate=META_LR,
        hyper=(*_SHARED, _SERVER_LR, _META_LR),
    ),
    Algorithm(
        name="meta-sgd", source="Li et al. 2017, arXiv 1707.09835, algorithm 1",
        summary="as maml, with a learned rate for each weight",
        episodes=True, weighting="equal", gradient=steps.learned_rate_gradient, rate=META_LR,
        adapt=steps.learned_rate_adapt, extra_state=_own_rates,
        hyper=(*_SHARED, _SERVER_LR, _META_LR),
    ),
    Algorithm(
        name="reptile", source="Nichol et al. 2018, arXiv 1803.02999, algorithm 1",
        summary="as fedavg, with each device counting the same",
        episodes=False, weighting="equal", gradient=steps.batch_gradient,
        hyper=(*_SHARED, _SERVER_LR),
    ),
)
# fmt: on


NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
"""Names of algorithms; they also name options' values, folders and columns."""
HYPER_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Names of hyperparameters; they also name options and state."""
EVERY: Final = "all"
"""The name that commands take for all algorithms."""


def _table(rows: tuple[Algorithm, ...]) -> dict[str, Algorithm]:
    table = {row.name: row for row in rows}
    assert len(table) == len(rows), "two algorithms of one name"
    return table


ALGORITHMS: Final = _table(_ROWS)


@contextmanager
def registered(row: Algorithm) -> Iterator[None]:
    """Offer an algorithm by its name in this process, within the `with` block.

    InvalidInput: the name is taken or malformed, or a hyperparameter has the name of one with other
    valid values.
    """
    _check_name(row.name, NAME, "an algorithm's name has 1 to 40 of a-z, 0-9, _ and -")
    if row.name == EVERY:
        raise InvalidInput(f"{EVERY!r} stands for all algorithms; choose another name")
    if row.name in ALGORITHMS:
        raise InvalidInput(f"there is an algorithm {row.name!r} already; choose another name")
    declared = hyperparameters()
    for hyper in row.hyper:
        _check_name(hyper.name, HYPER_NAME, "a hyperparameter's name has 1 to 40 of a-z, 0-9 and _")
        known = declared.get(hyper.name, hyper)
        if known.rule != hyper.rule:
            raise InvalidInput(
                f"the hyperparameter {hyper.name!r} of {row.name} must have the valid values that "
                "other algorithms declare for it, or another name"
            )
    ALGORITHMS[row.name] = row
    try:
        yield
    finally:
        del ALGORITHMS[row.name]


def _check_name(name: object, pattern: re.Pattern[str], rule: str) -> None:
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise InvalidInput(f"{rule}, got {name!r:.60}")


def hyperparameters() -> dict[str, Hyperparameter]:
    """Return the hyperparameters of all algorithms by name, as the first of them declares each."""
    rows: dict[str, Hyperparameter] = {}
    for algorithm_row in ALGORITHMS.values():
        for row in algorithm_row.hyper:
            rows.setdefault(row.name, row)
    return rows


def algorithm(name: str) -> Algorithm:
    """Return the row of that name, or for NAME+adam the row with Adam on the cloud.

    InvalidInput lists the existing names.
    """
    base, plus, server = name.partition("+")
    row = ALGORITHMS.get(base)
    if row is None or (plus and (server != ADAM.name or row.server is ADAM)):
        raise InvalidInput(
            f"no algorithm {name[:80]!r}; choose from {', '.join(ALGORITHMS)}, or add +{ADAM.name} "
            "for Adam on the cloud, as in maml+adam"
        )
    return _with_adam(row) if plus else row


def _with_adam(row: Algorithm) -> Algorithm:
    of_server = {hyper.name for hyper in _ADAM}
    return replace(
        row,
        name=f"{row.name}+{ADAM.name}",
        server=ADAM,
        source=f"{row.source}; Reddi et al. 2021, arXiv 2003.00295",
        hyper=(*(hyper for hyper in row.hyper if hyper.name not in of_server), *_ADAM),
    )


def defaults(name: str) -> Hyper:
    """Return the default hyperparameters of an algorithm."""
    return Hyper(**{row.name: row.default for row in algorithm(name).hyper})
