"""The algorithms, one row each. What differs is the graph of a step and what the cloud does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.algorithms import steps
from triplane.unified_ir.federated.algorithms.hyper import ANCHOR, LR, META_LR, Hyper
from triplane.unified_ir.federated.algorithms.objective import Objective
from triplane.unified_ir.federated.algorithms.steps import shared_trained
from triplane.unified_ir.federated.core.defaults import ADAM_LR, SERVER_LR
from triplane.unified_ir.ir import Function, Role, StateTensor

Gradient = Callable[[Objective, int], Function]
ExtraState = Callable[[Objective, Hyper], Mapping[str, StateTensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to learn together.

    episodes: a step takes support and query instead of one batch. weighting: of updates, by
    "examples" or "equal". server: the cloud's optimizer, a row of `core.reduce.SERVERS`. gradient:
    what a step goes against, after some inner steps. rate: state that a step multiplies it with.
    adapt: one step of adaptation. extra_state: state beside the module's. server_lr: the cloud's
    default rate.
    """

    name: str
    source: str
    episodes: bool
    weighting: str
    server: str
    gradient: Gradient
    rate: str
    adapt: Callable[[Objective], Function]
    extra_state: ExtraState
    server_lr: float = SERVER_LR

    @property
    def learns_rates(self) -> bool:
        """Whether adaptation has rates of its own instead of `hyper.lr`."""
        return self.adapt is steps.learned_rate_adapt

    def step(self, of: Objective, hyper: Hyper) -> Function:
        """The entry `local_update`."""
        return steps.descent(self.gradient(of, hyper.inner_steps), self.rate, "local_update")


def _rates(of: Objective, **values: float) -> dict[str, StateTensor]:
    dtype = steps.scalar_of(of).dtype.numpy
    named = {f"hyper.{k}": np.asarray(v, dtype) for k, v in values.items()}
    return {k: StateTensor(Role.BUFFER, v) for k, v in named.items()}


def _lr(of: Objective, hyper: Hyper) -> dict[str, StateTensor]:
    return _rates(of, lr=hyper.lr)


def _meta_lr(of: Objective, hyper: Hyper) -> dict[str, StateTensor]:
    return _rates(of, lr=hyper.lr, meta_lr=hyper.meta_lr)


def _anchored(of: Objective, hyper: Hyper) -> dict[str, StateTensor]:
    anchors = {
        ANCHOR + p: StateTensor(Role.BUFFER, of.state[p].array.copy()) for p in shared_trained(of)
    }
    return _rates(of, lr=hyper.lr, proximal=hyper.proximal) | anchors


def _learned(of: Objective, hyper: Hyper) -> dict[str, StateTensor]:
    rates = steps.learned_rates(of, hyper.lr)
    own = {k: StateTensor(Role.PARAMETER, v) for k, v in rates.items()}
    return _rates(of, meta_lr=hyper.meta_lr) | own


# fmt: off
_ROWS: Final = (
    Algorithm(
        name="fedavg", source="McMahan et al. 2017, arXiv 1602.05629, algorithm 1",
        episodes=False, weighting="examples", server="sgd",
        gradient=steps.batch_gradient, rate=LR, adapt=steps.plain_adapt, extra_state=_lr,
    ),
    Algorithm(
        name="fedprox", source="Li et al. 2020, arXiv 1812.06127, algorithm 2",
        episodes=False, weighting="examples", server="sgd",
        gradient=steps.proximal_gradient, rate=LR, adapt=steps.plain_adapt, extra_state=_anchored,
    ),
    Algorithm(
        name="fedadam", source="Reddi et al. 2021, arXiv 2003.00295, algorithm 2",
        episodes=False, weighting="examples", server="adam",
        gradient=steps.batch_gradient, rate=LR, adapt=steps.plain_adapt, extra_state=_lr,
        server_lr=ADAM_LR,
    ),
    Algorithm(
        name="maml",
        source="Chen et al. 2018, arXiv 1802.07876; Finn et al. 2017, arXiv 1703.03400",
        episodes=True, weighting="equal", server="sgd",
        gradient=steps.meta_gradient, rate=META_LR, adapt=steps.plain_adapt,
        extra_state=_meta_lr,
    ),
    Algorithm(
        name="fomaml", source="Finn et al. 2017, arXiv 1703.03400, section 5.2",
        episodes=True, weighting="equal", server="sgd",
        gradient=steps.first_order_gradient, rate=META_LR, adapt=steps.plain_adapt,
        extra_state=_meta_lr,
    ),
    Algorithm(
        name="meta-sgd", source="Li et al. 2017, arXiv 1707.09835, algorithm 1",
        episodes=True, weighting="equal", server="sgd",
        gradient=steps.learned_rate_gradient, rate=META_LR, adapt=steps.learned_rate_adapt,
        extra_state=_learned,
    ),
    Algorithm(
        name="reptile", source="Nichol et al. 2018, arXiv 1803.02999, algorithm 1",
        episodes=False, weighting="equal", server="sgd",
        gradient=steps.batch_gradient, rate=LR, adapt=steps.plain_adapt, extra_state=_lr,
    ),
)
# fmt: on


def _table(rows: tuple[Algorithm, ...]) -> Mapping[str, Algorithm]:
    table = {row.name: row for row in rows}
    assert len(table) == len(rows), "two algorithms of one name"
    return table


ALGORITHMS: Final = _table(_ROWS)


def algorithm(name: str) -> Algorithm:
    """The row of that name; InvalidInput names those there are."""
    if name not in ALGORITHMS:
        raise InvalidInput(f"algorithms are {', '.join(ALGORITHMS)}; got {name[:80]!r}")
    return ALGORITHMS[name]


def defaults(name: str) -> Hyper:
    """What an algorithm runs with where nobody says otherwise."""
    return Hyper(server_lr=algorithm(name).server_lr)
