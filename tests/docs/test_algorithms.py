"""docs/federated.md lists every algorithm with its source and hyperparameters."""

from tests.support.pages import check_table

from triplane.unified_ir.federated.algorithms import ALGORITHMS


def test_the_documentation_lists_every_algorithm():
    check_table(
        "federated.md", "algorithms", ("name", "source", "hyperparameters and defaults"),
        (
            (
                f"`{row.name}`",
                row.source,
                ", ".join(f"`{h.name}` {h.default:g}" for h in row.hyper),
            )
            for row in ALGORITHMS.values()
        ),
    )  # fmt: skip
