"""A stand-in for torchrun without torch: ranks in sessions and log files of their own, all ended when one fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main():
    ranks, script, root = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    children = []

    def stop(*_):
        for child in children:
            child.terminate()
        time.sleep(0.2)
        sys.exit(143)

    signal.signal(signal.SIGTERM, stop)
    for rank in range(ranks):
        folder = Path(root) / "logs" / f"none_{os.getpid()}" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
            children.append(
                subprocess.Popen([sys.executable, script, root], env=env, stdout=out, stderr=err, start_new_session=True)
            )
    while True:
        codes = [child.poll() for child in children]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            rank, code = failed[0]
            words = f"rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 1)"
            print(f"Root Cause (first observed failure):\n[0]:\n  {words}", flush=True)
            for child in children:
                child.kill()
            sys.exit(1)
        if all(code == 0 for code in codes):
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main()
