"""The training loop: data, step, events, checkpoints, held-out loss; stops when asked, resumes where it stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fullstride.engine.assembly import Built, Writer, announce, assemble, corpus_folder, open_loader, progress
from fullstride.engine.checkpoint import Checkpointer
from fullstride.engine.data.loader import Loader
from fullstride.engine.evaluate import held_out_loss
from fullstride.engine.export import export, refuse_existing
from fullstride.engine.moments import moment
from fullstride.engine.process import Place, versions
from fullstride.engine.signals import StopFlag
from fullstride.events import Evaluation, Phase, RunEnd, Span, now_ns
from fullstride.files import write_bytes
from fullstride.plan.plan import DType, Plan

MEMORY_EVERY = 10
"""Steps between readings of memory."""
FLUSH_NS = 500_000_000
"""How long an event may wait for whoever follows the run."""


@dataclass(frozen=True)
class TrainOptions:
    """How a plan is carried to its end."""

    save_every: int = 200
    keep: int = 3
    eval_every: int = 0
    """Steps between held-out losses; 0: with each checkpoint."""
    eval_steps: int = 16
    """Batches of one held-out loss, as far as there is data."""
    export: str = ""
    export_dtype: DType | None = None
    """None: that of the model directory which training began with, else the masters' own."""
    merge: bool = False
    """Export the whole model with its adapters merged into it, not the adapters alone."""


def train(plan: Plan, options: TrainOptions, place: Place, out: Writer) -> Literal["done", "signal"]:
    """Run a Plan to its end, from the newest whole checkpoint if there is one.

    Returns:
        `done`, or `signal` when it was asked to stop and has saved.

    Raises:
        NotFinite: the loss is no number.
        FullstrideError: what the user or the machine has wrong.
    """
    if options.export:
        refuse_existing(Path(options.export))
    stop = StopFlag(place.host_group)
    built = assemble(plan, place, out)
    saver = Checkpointer(out.run_dir.checkpoints, keep=options.keep, group=place.save_group)
    trainer = Trainer(built, options, place, out, saver)
    trainer.resume()
    trainer.reserve()
    announce(built, "train", place, out)
    built.recorder.begin()
    while built.run.step_index < plan.recipe.steps and not stop.agreed():
        trainer.step()
    stop.close()
    return trainer.end()


class Trainer:
    """One rank's part of a training run."""

    def __init__(self, built: Built, options: TrainOptions, place: Place, out: Writer, saver: Checkpointer) -> None:
        """Made by `train`."""
        self._built, self._options, self._place, self._out, self._saver = built, options, place, out, saver
        self._saved, self._flushed = -1, now_ns()
        self._evaluation = self._open_evaluation()
        self._versions = versions(place.device)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint: weights, moments, random numbers, position in the data."""
        self._saver.clean()
        folder = self._saver.latest()
        if folder is None:
            return
        manifest = self._saver.load(self._built.run, folder)
        self._built.loader.samples = manifest.samples
        self._saved = manifest.step
        plan = self._built.plan
        other = "" if manifest.work_hash == plan.work_hash else ", with another model, workload or recipe than before"
        self._say("resume", f"{folder.name}{other}")

    def reserve(self) -> None:
        """Have the memory for copies of the state before the first step, so that no save waits for it."""
        if self._built.run.step_index + self._options.save_every >= self._built.plan.recipe.steps:
            return  # the only save is the one at the end, where nothing waits
        no_copies = self._saver.reserve(self._built.run)
        if no_copies:
            self._say("saves", no_copies)

    def step(self) -> None:
        """One optimizer step and what is due after it."""
        built, options = self._built, self._options
        step = built.run.step_index
        moment("step", step)
        batch = built.loader.next()
        self._span(step, "data", built.loader.waited)
        result = built.run.step(batch)
        built.recorder.step(step, result)
        done = step + 1
        if done % MEMORY_EVERY == 0:
            self._out.events.write(built.meter.read(step))
        if done % options.save_every == 0 and done < built.plan.recipe.steps:
            self._save()
        if done % (options.eval_every or options.save_every) == 0 and done < built.plan.recipe.steps:
            self._evaluate()
        self._tell_problems()
        if now_ns() - self._flushed > FLUSH_NS:
            self._out.events.flush()
            self._flushed = now_ns()

    def end(self) -> Literal["done", "signal"]:
        """Save; when all steps are taken also evaluate, export and leave DONE."""
        run = self._built.run
        self._built.recorder.finish()
        finished = run.step_index >= self._built.plan.recipe.steps
        self._save()
        self._saver.wait()
        if finished:
            self._evaluate()
            if self._options.export:
                self._say("export", self._options.export)
                export(run, Path(self._options.export), dtype=self._options.export_dtype, merge=self._options.merge)
        cause: Literal["done", "signal"] = "done" if finished else "signal"
        self._out.events.write(RunEnd(time_ns=now_ns(), cause=cause))
        self._out.events.flush()
        self._built.loader.close()
        if finished and self._place.rank == 0:
            write_bytes(self._out.run_dir.done, b"")
        return cause

    def _save(self) -> None:
        run = self._built.run
        if run.step_index == self._saved:
            return
        self._built.recorder.finish()  # a state that is no number is never saved
        start = now_ns()
        self._saver.save(run, self._built.loader.samples, self._versions)
        self._saved = run.step_index
        self._span(run.step_index - 1, "checkpoint", (start, now_ns()))
        self._say("saves", f"step {run.step_index}: training stood still for {self._saver.stall_seconds:.2f} s")
        self._built.recorder.begin()

    def _tell_problems(self) -> None:
        """A save that failed is told, and training goes on: the next one may succeed."""
        problem = self._saver.problem()
        if problem:
            self._say("checkpoint", str(problem))

    def _open_evaluation(self) -> Loader | None:
        plan = self._built.plan
        if not plan.workload.eval_data:
            return None
        folder = corpus_folder(plan.workload.eval_data, plan, self._place, self._out.run_dir)
        return open_loader(folder, plan, self._place, self._built.vocabulary)

    def _evaluate(self) -> None:
        if self._evaluation is None:
            return
        self._built.recorder.finish()
        steps = max(1, min(self._options.eval_steps, self._evaluation.num_samples // self._evaluation.per_step))
        loss, tokens = held_out_loss(self._built.run, self._evaluation, steps)
        step = self._built.run.step_index
        self._out.events.write(Evaluation(time_ns=now_ns(), step=step, loss=loss, tokens=tokens))
        self._say("evaluation", f"step {step}: held-out loss {loss:.4f} over {tokens} tokens")
        self._built.recorder.begin()

    def _span(self, step: int, phase: Phase, stretch: tuple[int, int]) -> None:
        start, end = stretch
        self._out.events.write(Span(time_ns=end, step=step, phase=phase, start_ns=start, end_ns=end))

    def _say(self, phase: str, note: str) -> None:
        progress(self._out, phase, note)
        if self._place.rank == 0:
            print(f"{phase}: {note}", flush=True)  # into the rank's log
