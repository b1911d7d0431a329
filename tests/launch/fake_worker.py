"""A worker without torch that speaks the protocol of orders; what it does is said by the plan's name or the run's label.

Ranks are told by torchrun's variables. Rank 0 answers; the others wait for rank 0's answers, as a collective would.
"""

import os
import signal
import sys
import time

from fullstride.files import from_json, write_bytes, write_json
from fullstride.rundir import AsideOrder, BuildOrder, ExitOrder, Failure, ReleaseOrder, Reply, RunDir, RunOrder

RANK = int(os.environ.get("RANK", "0"))
KINDS = (BuildOrder, RunOrder, AsideOrder, ReleaseOrder, ExitOrder)


def read(path):
    for kind in KINDS:
        try:
            return from_json(path.read_bytes(), kind, str(path))
        except Exception:
            continue
    raise SystemExit("no order")


def act(word):
    """Do what a word says; only `rank1-` words happen on rank 1."""
    if word.startswith("rank1-") != (RANK == 1):
        return None
    word = word.removeprefix("rank1-")
    if word == "crash":
        raise ValueError("the fake worker fell over")
    if word == "cuda-oom":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB")
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang":
        time.sleep(300)
    if word == "quit":
        sys.exit(0)
    if word == "nan":
        return Failure(failure="not_finite", message="loss is not finite at step 3", rank=0)
    return None


def wait_for(paths, content=""):
    while not all(path.exists() and path.read_text().endswith(content) for path in paths):
        time.sleep(0.01)


def main():
    run_dir, ranks = RunDir(root=sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1"))
    seen = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "NCCL_DEBUG", "WORLD_SIZE")}
    write_bytes(run_dir.path / f"env{RANK}", repr(seen).encode())
    print(f"rank {RANK} is here", file=sys.stderr, flush=True)
    # As a process group does: nobody goes on before all ranks of this start are there.
    write_bytes(run_dir.path / f"pid{RANK}", f"{os.getpid()} {os.getppid()}".encode())
    wait_for([run_dir.path / f"pid{rank}" for rank in range(ranks)], f" {os.getppid()}")
    number = 1
    while True:
        order, reply = run_dir.order(number), run_dir.reply(number)
        if reply.exists():
            number += 1
        elif order.exists():
            what = read(order)
            failure = act(what.plan if isinstance(what, BuildOrder) else getattr(what, "label", ""))
            if RANK:
                write_bytes(run_dir.path / "acks" / f"{number}.{RANK}", b"done")
            else:
                wait_for([run_dir.path / "acks" / f"{number}.{rank}" for rank in range(1, ranks)])
                ok = failure is None
                write_json(reply, Reply(number=number, ok=ok, seconds=0.01, failure=failure, peak_allocated_bytes=7))
            if isinstance(what, ExitOrder):
                return
            while not reply.exists():
                time.sleep(0.01)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
