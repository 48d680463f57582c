"""`triplane cloud init` and `triplane cloud up`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triplane.cloud.__main__ import main, options_from, tls_1_3_only
from triplane.cloud.home import Home, InitializedHome
from triplane.cloud.home import initialize as make


def initialize(
    home: Path, hosts: tuple[str, ...], offline_keys: Path, signers: tuple[int, int] = (1, 1)
) -> tuple[dict[str, Any], str]:
    """The record and the text of a new cloud. signers: so many of so many people release."""
    need, have = signers
    created = make(
        home,
        hosts,
        offline_keys=offline_keys,
        keys={"release": have},
        thresholds={"release": need},
    )
    record = {
        "home": str(created.home.path),
        "hosts": list(created.hosts),
        "operator": str(created.home.operator),
        "offline_keys": str(created.offline_keys),
        "offline": [str(path) for path in created.offline],
    }
    return record, _text(created)


def _text(created: InitializedHome) -> str:
    keys = ", ".join(path.name for path in created.offline)
    return "\n".join(
        [
            f"A cloud in {created.home.path}, for {', '.join(created.hosts)}.",
            "",
            f"TAKE AWAY from this machine, before anything else: {created.offline_keys}",
            f"  It holds {keys}: the keys that decide what runs on your nodes.",
            "  Keep two copies in two places. Who has them signs with `triplane sign`. If the root",
            "  key is lost, every node must be enrolled again.",
            "",
            f"Start it:         triplane cloud up --home {created.home.path}",
            f"Your identity:    export TRIPLANE_IDENTITY={created.home.operator}",
            "Let a node in:    triplane cloud token --role node --name NAME",
        ]
    )


def run(**options: Any) -> None:
    """Serve until a signal; prints the ready line."""
    tls_1_3_only()
    as_json = options.pop("as_json")
    ports = Home(options["home"]).ports()
    options |= {name: port for name, port in ports.items() if options[name] is None}
    main(options_from({**options, "json": as_json}))
