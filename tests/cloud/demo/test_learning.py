"""The terms of the demo's masked rounds."""

import pytest

from triplane.cloud.demo import learning
from triplane.unified_ir.federated.masking import choose_parameters


@pytest.mark.parametrize(("cohort", "lost"), [(6, 2), (5, 1), (4, 1)])
def test_no_round_fails_when_two_of_six_devices_are_killed(cohort, lost):
    """Both in one round, or one after the other; then four or five go on."""
    chosen = choose_parameters(
        cohort,
        least=int(learning.LEAST_COHORT),
        lost_share=float(learning.LOST_SHARE),
        colluding_share=float(learning.COLLUDING_SHARE),
        failure=1e-6,
    )
    assert (chosen.lost, chosen.least) == (lost, 3)
