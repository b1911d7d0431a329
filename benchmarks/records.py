"""Dated records under `results/`, for the benchmarks that write one."""

import datetime
import json
from pathlib import Path


def write(name, device, asked, **found):
    """Write what was asked and found on `device` to `results/DATE-NAME.json`."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    target = Path(__file__).parent / "results" / f"{date}-{name}.json"
    target.write_text(json.dumps({"date": date, "device": device, "asked": asked, **found}, indent=1) + "\n")
    print(f"wrote {target.name}")
