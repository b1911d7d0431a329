"""The process that a launcher starts, one a rank: `python -m fullstride.engine.worker RUN_DIR`, under torchrun.

With `--train` it runs the RUN_DIR's plan to its end; otherwise it carries out the orders that it finds there. Whatever goes
wrong is told once, by the first rank that met it: as a Failure in `FAILED.json` and in the reply to the order in hand.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from typing import NoReturn

import torch.distributed as dist

from fullstride.engine.assembly import Writer
from fullstride.engine.failures import failure_of, missing
from fullstride.engine.orders import OrderLoop
from fullstride.engine.process import Place, join, versions, write_versions
from fullstride.engine.trainer import TrainOptions, train
from fullstride.errors import EnvironmentFault, FullstrideError, Interrupted
from fullstride.events import EventWriter, RunEnd, now_ns
from fullstride.files import write_json
from fullstride.plan.toml import read_plan
from fullstride.rundir import Failure, Reply, RunDir

LOST_SECONDS = 2.0
"""How long a rank that lost its peers stays, so that the launcher first sees the one that ended first."""
HEARD_SECONDS = 10.0
"""How long the first rank that waited in vain listens for the others; the one that is not heard of is the one that hangs."""
IDLE_SECONDS = 1800.0
"""How long a worker waits for an order before it ends."""


def parser() -> argparse.ArgumentParser:
    """The worker's own options."""
    made = argparse.ArgumentParser(prog="python -m fullstride.engine.worker", description=__doc__)
    made.add_argument("run_dir")
    made.add_argument("--train", action="store_true", help="run the plan to its end instead of waiting for orders")
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--idle-seconds", type=float, default=IDLE_SECONDS)
    made.add_argument("--save-every", type=int, default=TrainOptions.save_every)
    made.add_argument("--keep", type=int, default=TrainOptions.keep, help="checkpoints that are kept")
    made.add_argument("--eval-every", type=int, default=TrainOptions.eval_every)
    made.add_argument("--eval-steps", type=int, default=TrainOptions.eval_steps)
    made.add_argument("--export", default="", help="folder for a Hugging Face model at the end")
    made.add_argument("--merge", action="store_true", help="export the model with its adapters merged into it")
    made.add_argument("--export-dtype", choices=("fp64", "fp32", "bf16", "fp16"), default=TrainOptions.export_dtype)
    return made


def main(argv: list[str] | None = None) -> int:
    """Be one rank; returns the exit status, or ends the process at once when something went wrong."""
    args = parser().parse_args(argv)
    run_dir = RunDir(root=args.run_dir)
    rank = int(os.environ.get("RANK", "0"))
    place: Place | None = None
    loop: OrderLoop | None = None
    events: EventWriter | None = None
    try:
        plan = read_plan(run_dir.plan) if args.train or run_dir.plan.exists() else None
        place = join(plan, args.device)
        events = _open_events(run_dir, rank)
        if rank == 0:
            write_versions(run_dir, versions(place.device))
        if args.train:
            assert plan is not None
            return _train(args, place, Writer(run_dir, events))
        loop = OrderLoop(place, Writer(run_dir, events), args.idle_seconds)
        loop.run()
    except BaseException as error:
        _end(error, events, _tell(error, rank, run_dir, place, loop))
    events.close()
    _leave()
    return 0


def _open_events(run_dir: RunDir, rank: int) -> EventWriter:
    try:
        return EventWriter(run_dir.events(rank))
    except OSError as error:
        raise EnvironmentFault(f"{run_dir.events(rank)}: {error.strerror}", fix="check permissions and the disk") from None


def _train(args: argparse.Namespace, place: Place, out: Writer) -> int:
    options = TrainOptions(
        save_every=args.save_every,
        keep=args.keep,
        eval_every=args.eval_every,
        eval_steps=args.eval_steps,
        export=args.export,
        export_dtype=args.export_dtype,
        merge=args.merge,
    )
    cause = train(read_plan(out.run_dir.plan), options, place, out)
    out.events.close()
    _leave()
    return 0 if cause == "done" else Interrupted.exit_code


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _tell(error: BaseException, rank: int, run_dir: RunDir, place: Place | None, loop: OrderLoop | None) -> float:
    """Say what went wrong, unless another rank has; returns the seconds to stay, where it is another's word that counts."""
    failure = failure_of(error, rank)
    if isinstance(error, FullstrideError):
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    waits = place if failure.failure == "hang" else None
    if place and (waits or failure.rank == -1):  # a rank that lost its peer lives, and is not the one that hangs
        _say_waiting(place, failure)
    if failure.rank == -1:
        return LOST_SECONDS
    if isinstance(error, KeyboardInterrupt | SystemExit) or not _first(place):
        return HEARD_SECONDS + LOST_SECONDS if waits else 0.0
    if waits:
        failure = _with_missing(waits, failure)
    try:
        write_json(run_dir.failed, failure)
        if loop:
            write_json(run_dir.reply(loop.number), _bad_reply(loop.number, failure))
    except EnvironmentFault as full:
        print(f"rank {rank}: {full}", file=sys.stderr, flush=True)
    return 0.0


def _say_waiting(place: Place, failure: Failure) -> None:
    with contextlib.suppress(RuntimeError):  # the store has gone with its host
        place.channel.tell("waits", failure.message)


def _with_missing(place: Place, failure: Failure) -> Failure:
    try:
        return missing(failure, place.channel.told("waits", HEARD_SECONDS), place.world_size)
    except RuntimeError:
        return failure


def _first(place: Place | None) -> bool:
    try:
        return place is None or place.channel.claim("failure")
    except RuntimeError:  # the store has gone with its host: then nobody else can speak either
        return True


def _bad_reply(number: int, failure: Failure) -> Reply:
    return Reply(number=number, ok=False, seconds=0.0, failure=failure)


def _end(error: BaseException, events: EventWriter | None, stay_seconds: float) -> NoReturn:
    """Leave at once: a tidy end would wait for ranks that hang in a collective."""
    time.sleep(stay_seconds)
    if events:
        try:
            events.write(RunEnd(time_ns=now_ns(), cause="error", note=type(error).__name__))
            events.close()
        except OSError:
            pass  # a full disk must not hide the first error
    sys.stdout.flush()
    sys.stderr.flush()
    code = error.exit_code if isinstance(error, FullstrideError) else 6
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
