"""Events of a run's beginning, and entries of a journal."""

from tests.cloud.federation.given import spec

from triplane.cloud.federation.journal import Prepared, RunRecord

PREPARED = Prepared(
    plan="aa" * 32, plan_digest="d", state="bb" * 32, roles={"w": "parameter"},
    weighting="examples", server="sgd", since_s=1.0,
)  # fmt: skip


def entry(**fields):
    defaults = {
        "number": 1, "id": "0" * 16, "key": b"k" * 16, "asked": bytes(32), "spec": spec(),
        "started_s": 1.0, "started_by": "operator", "prepared": PREPARED,
    }  # fmt: skip
    return RunRecord(**defaults | fields)
