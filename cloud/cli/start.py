"""`triplane cloud init` and `triplane cloud up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triplane.cloud.__main__ import main, options_from, tls_1_3_only
from triplane.cloud.home import Home
from triplane.cloud.home import initialize as make


def initialize(
    *,
    home: Path,
    hosts: tuple[str, ...],
    offline_keys: Path,
    release_keys: int,
    release_threshold: int,
) -> tuple[dict[str, Any], str]:
    """Create a cloud; return its record and what to do next."""
    created = make(
        home,
        hosts,
        offline_keys=offline_keys,
        keys={"release": release_keys},
        thresholds={"release": release_threshold},
    )
    record = {
        "home": str(created.home.path),
        "hosts": list(created.hosts),
        "operator": str(created.home.operator),
        "offline_keys": str(created.offline_keys),
        "offline": [str(path) for path in created.offline],
    }
    keys = ", ".join(path.name for path in created.offline)
    return (
        record,
        f"""\
Created a cloud in {created.home.path}, for {", ".join(created.hosts)}.

TAKE THIS FOLDER AWAY from this machine before anything else: {created.offline_keys}
  It holds {keys}: the keys that decide what runs on your nodes.
  Keep two copies in two places. Their holders sign with `triplane sign`. If the root key is lost,
  every node must be enrolled again.

Start it:         triplane cloud up --home {created.home.path}
Your identity:    export TRIPLANE_IDENTITY={created.home.operator}
Let a node in:    triplane cloud token --role node --name NAME""",
    )


def run(*, as_json: bool, **options: Any) -> None:
    """Print the ready line and serve until a signal."""
    # Before `main`, which imports grpc.
    tls_1_3_only()
    ports = Home(options["home"]).ports()
    # The ports of the last start: nodes have stored the address.
    options |= {name: port for name, port in ports.items() if options[name] is None}
    main(options_from({**options, "json": as_json}))
