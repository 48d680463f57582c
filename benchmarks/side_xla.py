"""Triplane's side on the engine xla: the Trainer's own step as one program of XLA."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import networks
from side_ours import stepping, trainer_of
from worker import Step, one_processor_per_thread, serve


def side(case: networks.Case) -> tuple[Step, dict[str, Any]]:
    """A training step from the case's starting weights."""
    one_processor_per_thread()
    trainer = trainer_of(case, engine="xla")
    start = time.process_time()
    step = stepping(trainer, trainer.training_program())
    return step, {"version": f"JAX {version('jax')}", "record_s": time.process_time() - start}


if __name__ == "__main__":
    serve(side)
