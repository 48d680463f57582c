"""Golden trajectories of optimizers and schedules by PyTorch: tests/golden/optim/updates.npz.

Run with the peers' interpreter: .venv-peers/bin/python -m benchmarks.oracles.optim
The gradients are given, so a trajectory shows the update rule and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

GOLDEN: Final = Path(__file__).parents[2] / "tests" / "golden" / "optim" / "updates.npz"
STEPS: Final = 20
SHAPES: Final = {"w": (3, 4), "b": (4,)}

Params = list[torch.nn.Parameter]
Make = Callable[[Params], tuple[torch.optim.Optimizer, Any]]


def _plain(kind: Any, **options: Any) -> Make:
    return lambda params: (kind(params, **options), None)


def _scheduled(schedule: Callable[[torch.optim.Optimizer], Any]) -> Make:
    def make(params: Params) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(params, lr=0.1)
        return optimizer, schedule(optimizer)

    return make


# fmt: off
_lr = torch.optim.lr_scheduler
CASES: Final[dict[str, Make]] = {
    "sgd":          _plain(torch.optim.SGD, lr=0.1),
    "sgd_decay":    _plain(torch.optim.SGD, lr=0.1, weight_decay=0.05),
    "momentum":     _plain(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov":     _plain(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    "adam":         _plain(torch.optim.Adam, lr=0.01),
    "adam_betas":   _plain(torch.optim.Adam, lr=0.01, betas=(0.0, 0.9), eps=1e-3),
    "adam_decay":   _plain(torch.optim.Adam, lr=0.01, weight_decay=0.05),
    "adamw":        _plain(torch.optim.AdamW, lr=0.01, weight_decay=0.05),
    "cosine":       _scheduled(lambda o: _lr.CosineAnnealingLR(o, 15, eta_min=0.01)),
    "exponential":  _scheduled(lambda o: _lr.ExponentialLR(o, 0.8)),
    "step_decay":   _scheduled(lambda o: _lr.StepLR(o, 6, 0.5)),
    "warmup":       _scheduled(lambda o: _lr.LinearLR(o, 1 / 8, 1.0, 7)),
    "clipped":      _plain(torch.optim.SGD, lr=0.1),
}
# fmt: on
CLIP_NORM: Final = 2.0


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


def trajectory(
    make: Make, start: dict[str, Any], grads: dict[str, Any], *, clip: bool
) -> dict[str, Any]:
    """Parameters after each step, (STEPS, *shape)."""
    params = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in start.items()}
    optimizer, schedule = make(list(params.values()))
    found: dict[str, list[Any]] = {k: [] for k in params}
    for t in range(STEPS):
        for k, p in params.items():
            p.grad = torch.tensor(grads[k][t])
        if clip:
            torch.nn.utils.clip_grad_norm_(list(params.values()), CLIP_NORM)
        optimizer.step()
        if schedule is not None and not (isinstance(schedule, _lr.CosineAnnealingLR) and t >= 15):
            schedule.step()
        for k, p in params.items():
            found[k].append(p.detach().numpy().copy())
    return {k: np.stack(v) for k, v in found.items()}


def main(cases: Iterable[str] = CASES) -> None:
    """Writes the file."""
    start, grads = arrays()
    made = {f"start/{k}": v for k, v in start.items()} | {f"grad/{k}": v for k, v in grads.items()}
    for name in cases:
        path = trajectory(CASES[name], start, grads, clip=name == "clipped")
        made |= {f"{name}/{k}": v for k, v in path.items()}
    made["torch"] = np.array(torch.__version__)
    np.savez_compressed(GOLDEN, **made)


if __name__ == "__main__":
    main()
