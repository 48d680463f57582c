"""Golden trajectories of optimizers and schedules by PyTorch: tests/golden/optim/*.npz.

Run with the peers' interpreter: .venv-peers/bin/python -m benchmarks.oracles.optim
`updates.npz`: the gradients are given, so a trajectory shows the update rule and nothing else;
`doubles.npz`: a few updates of the same trajectories in float64.
`schedules.npz`: the rate of each update; `plateau.npz`: that of each epoch. LAMB and Lion are not
in PyTorch: they are written here from their papers, in PyTorch's operators.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

FOLDER: Final = Path(__file__).parents[2] / "tests" / "golden" / "optim"
STEPS: Final = 100
KEPT: Final = (*range(10), *range(19, STEPS, 10))
"""Updates whose parameters are stored."""
KEPT_DOUBLES: Final = (0, 9, 99)
SHAPES: Final = {"w": (3, 4), "b": (4,)}
CLIPS: Final = {"clipped": 2.0, "clipped_each": 2.0, "clipped_value": 0.1}

Params = list[torch.nn.Parameter]
Make = Callable[[Params], torch.optim.Optimizer]


class LAMB(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, with phi(z) = z and Adam's bias corrections."""

    def __init__(self, params: Any, lr: float, *, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every tensor."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["t"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad**2, 0.001)
                m = state["m"] / (1 - 0.9 ** state["t"])
                v = state["v"] / (1 - 0.999 ** state["t"])
                u = m / (v.sqrt() + 1e-6) + group["weight_decay"] * p
                ratio = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0
                p -= group["lr"] * ratio * u


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, params: Any, lr: float, *, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every tensor."""
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                push = torch.sign(0.9 * m + 0.1 * p.grad) + group["weight_decay"] * p
                p -= group["lr"] * push
                m.mul_(0.99).add_(p.grad, alpha=0.01)


def _plain(kind: Any, **options: Any) -> Make:
    return lambda params: kind(params, **options)


def _grouped(params: Params) -> torch.optim.Optimizer:
    b, w = params  # a ParameterDict sorts its keys
    groups = [{"params": [w]}, {"params": [b], "lr": 0.02, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.05)


_o = torch.optim
# fmt: off
UPDATES: Final[dict[str, Make]] = {
    "sgd":           _plain(_o.SGD, lr=0.1),
    "sgd_decay":     _plain(_o.SGD, lr=0.1, weight_decay=0.05),
    "momentum":      _plain(_o.SGD, lr=0.1, momentum=0.9),
    "dampening":     _plain(_o.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "nesterov":      _plain(_o.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    "groups":        _grouped,
    "adam":          _plain(_o.Adam, lr=0.01),
    "adam_betas":    _plain(_o.Adam, lr=0.01, betas=(0.0, 0.9), eps=1e-3),
    "adam_decay":    _plain(_o.Adam, lr=0.01, weight_decay=0.05),
    "amsgrad":       _plain(_o.Adam, lr=0.01, amsgrad=True),
    "adamw":         _plain(_o.AdamW, lr=0.01, weight_decay=0.05),
    "adamw_amsgrad": _plain(_o.AdamW, lr=0.01, weight_decay=0.05, amsgrad=True),
    "rmsprop":       _plain(_o.RMSprop),
    "rmsprop_all":   _plain(_o.RMSprop, lr=0.01, alpha=0.9, momentum=0.8, centered=True,
                            weight_decay=0.05),
    "adagrad":       _plain(_o.Adagrad),
    "adagrad_all":   _plain(_o.Adagrad, lr=0.1, lr_decay=0.01, weight_decay=0.05,
                            initial_accumulator_value=0.2),
    "adadelta":      _plain(_o.Adadelta),
    "adadelta_all":  _plain(_o.Adadelta, lr=0.5, rho=0.8, eps=1e-4, weight_decay=0.05),
    "adafactor":     _plain(_o.Adafactor),
    "adafactor_all": _plain(_o.Adafactor, lr=0.1, beta2_decay=-0.6, eps=(None, 1e-2), d=2.0,
                            weight_decay=0.05),
    "lamb":          _plain(LAMB, lr=0.01, weight_decay=0.0),
    "lamb_decay":    _plain(LAMB, lr=0.01, weight_decay=0.05),
    "lion":          _plain(Lion, lr=0.01, weight_decay=0.0),
    "lion_decay":    _plain(Lion, lr=0.01, weight_decay=0.05),
    "averaged":      _plain(_o.SGD, lr=0.1),
    "clipped":       _plain(_o.SGD, lr=0.1),
    "clipped_each":  _plain(_o.SGD, lr=0.1),
    "clipped_value": _plain(_o.SGD, lr=0.1),
}

_s = torch.optim.lr_scheduler
SCHEDULES: Final[dict[str, Callable[[torch.optim.Optimizer], Any]]] = {
    "constant":        lambda o: _s.LambdaLR(o, lambda _: 1.0),
    "cosine":          lambda o: _s.CosineAnnealingLR(o, STEPS, eta_min=0.01),
    "exponential":     lambda o: _s.ExponentialLR(o, 0.95),
    "step_decay":      lambda o: _s.StepLR(o, 6, 0.5),
    "multi_step":      lambda o: _s.MultiStepLR(o, [7, 30, 31, 80], 0.3),
    "polynomial":      lambda o: _s.PolynomialLR(o, 60, 1.0),
    "polynomial_2":    lambda o: _s.PolynomialLR(o, 60, 2.5),
    "restarts":        lambda o: _s.CosineAnnealingWarmRestarts(o, 13, eta_min=0.01),
    "restarts_growing": lambda o: _s.CosineAnnealingWarmRestarts(o, 9, 2, eta_min=0.01),
    "one_cycle":       lambda o: _s.OneCycleLR(o, 0.1, STEPS, cycle_momentum=False),
    "one_cycle_line":  lambda o: _s.OneCycleLR(o, 0.1, STEPS, pct_start=0.4, div_factor=10,
                                               final_div_factor=100, anneal_strategy="linear",
                                               cycle_momentum=False),
    "warmup":          lambda o: _s.LinearLR(o, 1 / 8, 1.0, 7),
    "chained":         lambda o: _s.SequentialLR(
        o, [_s.LinearLR(o, 1 / 10, 1.0, 9), _s.ExponentialLR(o, 0.9), _s.StepLR(o, 10, 0.5)],
        [10, 50]),
    "product":         lambda o: _s.ChainedScheduler([_s.StepLR(o, 20, 0.5),
                                                      _s.ExponentialLR(o, 0.97)]),
}
# fmt: on


def arrays() -> tuple[dict[str, Any], dict[str, Any]]:
    """Starting parameters, and gradients (STEPS, *shape) of very different sizes."""
    rng = np.random.default_rng(5)
    start = {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
    sizes = 10.0 ** rng.uniform(-3, 1, STEPS)
    grads = {
        k: (rng.standard_normal((STEPS, *s)).T * sizes).T.astype(np.float32)
        for k, s in SHAPES.items()
    }
    return start, grads


def _clip(name: str, params: Params) -> None:
    if name == "clipped":
        torch.nn.utils.clip_grad_norm_(params, CLIPS[name])
    elif name == "clipped_each":
        for p in params:
            torch.nn.utils.clip_grad_norm_([p], CLIPS[name])
    elif name == "clipped_value":
        torch.nn.utils.clip_grad_value_(params, CLIPS[name])


def trajectory(
    name: str, start: dict[str, Any], grads: dict[str, Any], kept: tuple[int, ...] = KEPT
) -> dict[str, Any]:
    """Parameters after the kept updates, (len(kept), *shape); of "averaged", their means."""
    model = torch.nn.ParameterDict(
        {k: torch.nn.Parameter(torch.tensor(v)) for k, v in start.items()}
    )
    params = list(model.values())
    optimizer = UPDATES[name](params)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    shown = averaged.module if name == "averaged" else model
    found: dict[str, list[Any]] = {k: [] for k in start}
    for t in range(STEPS):
        for k, p in model.items():
            p.grad = torch.tensor(grads[k][t])
        _clip(name, params)
        optimizer.step()
        averaged.update_parameters(model)
        if t in kept:
            for k, p in shown.items():
                found[k].append(p.detach().numpy().copy())
    return {k: np.stack(v) for k, v in found.items()}


def rates(make: Callable[[torch.optim.Optimizer], Any]) -> Any:
    """The learning rate of each update, (STEPS,) float64, from 0.1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule, found = make(optimizer), []
    for _ in range(STEPS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return np.array(found)


PLATEAUS: Final[dict[str, dict[str, Any]]] = {
    "default": {"patience": 3},
    "absolute": {"patience": 2, "threshold": 0.02, "threshold_mode": "abs", "factor": 0.5},
    "cooldown": {"patience": 1, "cooldown": 4, "factor": 0.7, "min_lr": 0.02},
    "larger": {"mode": "max", "patience": 2, "factor": 0.3},
    "eager": {"patience": 0, "threshold": 0.0, "factor": 0.9},
}


def plateaus() -> dict[str, Any]:
    """The rate of each epoch after a measure that falls slowly under noise."""
    noise = np.random.default_rng(5).standard_normal(STEPS)
    values = 1.0 + np.exp(-np.arange(STEPS) / 15.0) + 0.02 * noise
    rates = {}
    for name, options in PLATEAUS.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, eps=0.0, **options)
        after = []
        for value in 3.0 - values if name == "larger" else values:
            schedule.step(value)
            after.append(float(optimizer.param_groups[0]["lr"]))
        rates[name] = np.array(after)
    return {"values": values, **rates}


def doubles(start: dict[str, Any], grads: dict[str, Any]) -> dict[str, Any]:
    """The trajectories that `trajectory` gives in float64, after the updates KEPT_DOUBLES."""
    start, grads = ({k: v.astype(np.float64) for k, v in a.items()} for a in (start, grads))
    return {
        f"{name}/{k}": v
        for name in UPDATES
        if name != "averaged"
        for k, v in trajectory(name, start, grads, KEPT_DOUBLES).items()
    }


def main() -> None:
    """Writes the files."""
    start, grads = arrays()
    made = {f"start/{k}": v for k, v in start.items()} | {f"grad/{k}": v for k, v in grads.items()}
    for name in UPDATES:
        made |= {f"{name}/{k}": v for k, v in trajectory(name, start, grads).items()}
    version = {"torch": np.array(torch.__version__)}
    np.savez_compressed(FOLDER / "updates.npz", **made, **version)
    np.savez_compressed(FOLDER / "doubles.npz", **doubles(start, grads), **version)
    np.savez_compressed(
        FOLDER / "schedules.npz", **{k: rates(v) for k, v in SCHEDULES.items()}, **version
    )
    np.savez_compressed(FOLDER / "plateau.npz", **plateaus(), **version)


if __name__ == "__main__":
    main()
