"""Options of pipeline stages: `triplane plan --stages`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.profiling import known_sizes

if TYPE_CHECKING:
    from triplane.unified_ir.ir import Function

BATCH: Final = "N"
"""Symbol of the number of samples."""
SLOTS: Final = 2
"""Slots of the optimizer for each parameter: those of Adam."""


def check(options: Mapping[str, Any]) -> None:
    """Refuse options that do not go together: either devices or stages are planned."""
    stages, count, batch = options["stages"], options["microbatches"], options["batch_size"]
    if stages is None:
        if count is not None:
            raise InvalidInput("--microbatches are those of a pipeline; add --stages N")
        if options["devices"] is None:
            raise InvalidInput(
                "add --devices N to split each layer over N devices, or --stages N to cut the "
                "layers into a pipeline"
            )
        return
    if options["devices"] is not None:
        raise InvalidInput(
            "--devices splits each layer, --stages cuts the layers into a pipeline; choose one"
        )
    for name in ("explain", "out", "out_model", "buckets"):
        if options[name] not in (None, False):
            flag = name.replace("_", "-")
            raise InvalidInput(
                f"--{flag} belongs to a plan with --devices; leave it out with --stages"
            )
    if count is not None and batch % count:
        raise InvalidInput(
            f"--batch-size {batch} does not divide into {count} equal microbatches; choose a "
            "multiple"
        )


def planned(function: Function, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the cut of a forward function into stages, as a record and as lines."""
    from triplane.unified_ir.passes.sharding import Topology, read_topology
    from triplane.unified_ir.passes.sharding.stage_report import stage_record, stage_table
    from triplane.unified_ir.passes.sharding.stages import (
        DEFAULT_MICROBATCHES,
        microbatches_of,
        plan_stages,
        training_copies,
    )

    if changed := [n for n in function.result_names if n in function.param_names]:
        raise InvalidInput(
            f"{function.name} is no forward pass: it returns new state ({changed[0]}); stages are "
            "cut from --entry loss or predict, and training adds the backward pass to loss"
        )
    sizes = {BATCH: options["batch_size"], **options["sizes"]}
    known_sizes(function.name, (p.type for p in function.params), options["sizes"])
    stages, file = options["stages"], options["topology"]
    count = options["microbatches"] or DEFAULT_MICROBATCHES * stages
    count = microbatches_of(sizes[BATCH], count)
    plan = plan_stages(
        function,
        stages,
        count,
        sizes={**sizes, BATCH: sizes[BATCH] // count},
        copies=training_copies(SLOTS) if "loss" in function.result_names else 1,
        memory_bytes=options["memory"],
        topology=Topology() if file is None else read_topology(file),
    )
    return stage_record(plan), list(stage_table(plan))
