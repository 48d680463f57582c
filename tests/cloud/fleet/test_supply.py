"""What the metadata lets the automatic role do, as rollouts hear it."""

import asyncio
from typing import Any, cast

from tests.attacks.trust_stage import bundle_entry, stage

from triplane.cloud.fleet.facts import Limit
from triplane.cloud.fleet.supply import Supply
from triplane.proto.targets import Rule


def test_the_policys_share_limits_automatic_releases_but_not_what_people_signed(tmp_path):
    made = stage(tmp_path)
    supply = Supply(cast("Any", None), made.repository)

    def limit(version, role):
        return asyncio.run(supply.limit("digits", version, role))

    assert limit(2, "auto") is None  # no rule: that is said when the bundle is looked at
    made.allow(digits=Rule(0.25, "golden/digits", "accuracy", 0.9))
    made.release(bundle_entry("release/digits@2+ort-x64.bundle"))
    made.sign_auto("digits", 3)
    assert limit(2, "auto") == Limit(0.25, frozenset({"ort-x64"}))
    assert limit(3, "auto") == Limit(0.25)
    assert limit(3, "release") is None
