from triplane.cloud.fleet.rollout_eligibility import in_share
from triplane.edge.agent import policy


def test_cloud_and_node_agree_on_who_is_in_the_share():
    """The node decides; the cloud only spares it what it would refuse."""
    for share in (0.0, 0.1, 1 / 3, 0.5, 1.0):
        for i in range(200):
            for model in ("digits", "line"):
                given = (f"node-{i}", model, share)
                assert in_share(*given) == policy.in_share(*given)
