"""The verbs of this package and their part of the guide of `triplane`; see `shell.Tier`."""

from typing import Final

from triplane.unified_ir.cli.shell import Tier

GUIDE: Final = """\
\b
The same on many machines, signed, wave by wave (docs/deploying.md):
  triplane cloud init --host HOST --offline-keys DIR && triplane cloud up
  triplane registry push digits.tpm
  triplane sign digits@1 --keys DIR && triplane deploy digits@1 --to all

\b
New here? `triplane demo` does all of this on real data, in two to three minutes."""

TIER: Final = Tier(
    verbs={
        "demo": 0,
        "cloud": 60,
        "registry": 70,
        "sign": 80,
        "deploy": 90,
        "rollout": 100,
        "fleet": 110,
        "audit": 120,
        "federate": 150,
    },
    guide={20: GUIDE},
    extras={"sqlalchemy": "cloud", "flwr": "flower", "tritonclient": "dev"},
)
