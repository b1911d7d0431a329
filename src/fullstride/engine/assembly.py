"""From a Plan to something that steps: the model prepared, its data opened, the events begun."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from fullstride.engine.anatomy import find
from fullstride.engine.build import build_model
from fullstride.engine.data.corpus import build_corpus, check_vocabulary, locate, open_corpus
from fullstride.engine.data.loader import Loader, share_of
from fullstride.engine.data.pack import pack
from fullstride.engine.memory_stats import MemoryMeter
from fullstride.engine.process import Place, cache_folder
from fullstride.engine.recorder import StepRecorder
from fullstride.engine.run import Run, prepare
from fullstride.errors import BadInput, EnvironmentFault
from fullstride.events import EventWriter, Progress, RunStart, now_ns
from fullstride.plan.plan import Plan
from fullstride.rundir import RunDir

CORPUS_SECONDS = 4 * 3600.0
"""Longest wait for another rank to tokenise the corpus."""


@dataclass
class Built:
    """A Plan ready to step on this rank."""

    plan: Plan
    run: Run
    loader: Loader
    recorder: StepRecorder
    meter: MemoryMeter
    vocabulary: int
    seconds: float
    """How long it took to build."""


@dataclass
class Writer:
    """Where this rank's events go."""

    run_dir: RunDir
    events: EventWriter


def assemble(plan: Plan, place: Place, out: Writer) -> Built:
    """Build a Plan: data first, because it is quick to refuse, then the model.

    Args:
        plan: built from its seed, data from sample 0 on.
        place: this rank.
        out: where the events go.

    Raises:
        FullstrideError: what the user or the machine has wrong, on every rank that meets it.
    """
    began = time.monotonic()
    progress(out, "data")
    folder = corpus_folder(plan.workload.data, plan, place, out.run_dir)
    progress(out, "model")
    model = build_model(plan.model.source)
    meter = MemoryMeter(place.device)  # from here on: the model holds no memory yet, libraries are loaded
    embedding = model.get_submodule(find(model, plan.model).embedding)
    vocabulary = int(getattr(embedding, "num_embeddings", 0) or next(embedding.parameters()).shape[0])
    loader = open_loader(folder, plan, place, vocabulary)
    run = prepare(model, plan, device=place.device)
    recorder = StepRecorder(out.events, place.device, plan.workload.samples_per_step)
    return Built(plan, run, loader, recorder, meter, vocabulary, time.monotonic() - began)


def announce(built: Built, label: str, place: Place, out: Writer) -> None:
    """Write that a Plan is about to step.

    Args:
        built: at the step from which it goes on.
        label: name of this build in the events.
        place: this rank.
        out: where the events go.
    """
    start = RunStart(
        time_ns=now_ns(),
        rank=place.rank,
        world_size=place.world_size,
        host=place.host,
        pid=place.pid,
        plan_hash=built.plan.plan_hash,
        work_hash=built.plan.work_hash,
        label=label,
        wall_clock=time.time(),
        offset_ns=place.offset_ns,
        build_seconds=built.seconds,
        first_step=built.run.step_index,
    )
    out.events.write(start)
    out.events.flush()


def progress(out: Writer, phase: str, note: str = "") -> None:
    """A sign of life in the events."""
    out.events.write(Progress(time_ns=now_ns(), phase=phase, note=note))
    out.events.flush()


def corpus_folder(source: str, plan: Plan, place: Place, run_dir: RunDir) -> Path:
    """The token cache of a data source, made by the first rank of each host while the others wait.

    Raises:
        BadInput: data or tokenizer cannot be used; the same on every rank.
        EnvironmentFault: the disk is full or may not be written.
        TimedOut: the rank that tokenises did not end.
    """
    cache, tokenizer = cache_folder(run_dir), plan.workload.tokenizer
    told = ["", "", ""]
    if place.local_rank == 0:
        try:
            build_corpus(source, tokenizer, cache)
        except (BadInput, EnvironmentFault) as error:
            told = [type(error).__name__, error.message, error.fix]
    everybody = place.channel.gather(msgspec.json.encode(told), what=f"tokenising {source}", seconds=CORPUS_SECONDS)
    for raw in everybody:
        kind, message, fix = msgspec.json.decode(raw, type=list[str])
        if kind:
            raise (EnvironmentFault if kind == "EnvironmentFault" else BadInput)(message, fix=fix)
    return locate(source, tokenizer, cache)


def open_loader(folder: Path, plan: Plan, place: Place, vocabulary: int) -> Loader:
    """This rank's loader over a token cache, at sample 0.

    Raises:
        BadInput: tokens that the model does not have, or fewer than fill a sample.
    """
    corpus = open_corpus(folder)
    check_vocabulary(corpus, vocabulary)
    work = plan.workload
    packing = pack(corpus, work.sequence_length, work.documents, plan.recipe.seed)
    pin = plan.data.pin and place.device.type == "cuda"
    return Loader(packing, work.samples_per_step, share_of(plan.layout, place.rank), plan.data, pin=pin)


def release(built: Built) -> None:
    """Free model, optimizer and data; compiled code stays for the next build."""
    built.loader.close()
    built.run.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone: what is freed goes back, as on a fresh start
        ctypes.CDLL("libc.so.6").malloc_trim(0)
