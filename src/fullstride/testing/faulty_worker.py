"""The worker, with the fault in FULLSTRIDE_FAULT built in: `python -m fullstride.testing.faulty_worker RUN_DIR ...`."""

from __future__ import annotations

import os
import sys

from fullstride.engine.worker import main
from fullstride.testing.faults import VARIABLE, install, parse_fault

if __name__ == "__main__":
    if os.environ.get(VARIABLE):
        install(parse_fault(os.environ[VARIABLE]), int(os.environ.get("RANK", "0")))
    sys.exit(main())
