"""Conversions whose maker is played."""

from tests.cloud.registry.models import child

MAKES = """
import hashlib, json, os, sys
order = json.loads(sys.stdin.readline())
data = open(order["model"], "rb").read()
done = {"model_digest": hashlib.sha256(data).hexdigest()}
if order["do"] == "convert":
    kept = order["kept_report"]
    measured = open(kept, "rb").read() if kept else b"%d" % os.getpid()
    open(order["report"], "wb").write(measured)
    made = EXTRA + data * 100 + measured
    open(order["out"], "wb").write(made)
    digest = hashlib.sha256(made).hexdigest()
    needs = {"runtime": "r", "min_version": "", "opset": 1, "instructions": [],
             "memory_bytes": 1, "latency_s": 0.0}
    done = {"size": len(made), "root_digest": digest, "content_digest": digest, "needs": needs}
print(json.dumps({"done": done}))
"""
"""A converter whose bundles differ in what their report measured, and in nothing else."""


def maker(extra=b""):
    """Such a child; another `extra` is another converter."""
    return child(MAKES.replace("EXTRA", repr(extra)))
