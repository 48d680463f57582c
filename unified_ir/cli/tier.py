"""The part of the command that this package registers; see `shell.Tier`."""

from typing import Final

from triplane.unified_ir.cli.shell import Tier

GUIDE: Final = """\
\b
From a model in Python to an answer over the network:
  triplane train examples/digits.py:Digits --data digits --out digits.tpm
  triplane convert digits.tpm --quantize int8 --calibrate digits --out digits.bundle
  triplane edge serve digits.bundle"""

TIER: Final = Tier(
    verbs={
        "data": 5,
        "train": 10,
        "evaluate": 12,
        "predict": 14,
        "import": 20,
        "export": 25,
        "convert": 30,
        "inspect": 40,
        "plan": 45,
        "diff": 50,
    },
    guide={10: GUIDE},
)
