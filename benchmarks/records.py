"""Dated records under `results/`, for the benchmarks that write one."""

import datetime
import sys
from pathlib import Path

import msgspec

from fullstride.cluster.probe import software_versions


def write(name, cluster, asked, **found):
    """Write what was asked and found on a cluster to `results/DATE-NAME.json`; plans and paths may stand in it."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    target = Path(__file__).parent / "results" / f"{date}-{name}.json"
    versions = {**software_versions(), **cluster.versions}
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    head = {"date": date, "device": cluster.device.name, "versions": versions, "command": command, "asked": asked}
    target.write_bytes(msgspec.json.format(msgspec.json.encode({**head, **found}, enc_hook=str), indent=1) + b"\n")
    print(f"wrote {target.name}")
