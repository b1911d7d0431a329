"""Law 2: whatever a Plan does, the numbers are those of one process with the unmodified model.

    python -m fullstride.engine.parity --draws 20 --ranks 2 --seed 0

draws models and Plans, runs each on gloo processes of its own, and compares loss, every gradient, the gradient norm and the
weights after three steps with a plain loop: `torch.optim.AdamW`, one forward over all samples, no part of the engine but the
initial weights. Prints the pairs of settings that were reached (`--draws 0`: until all are that the rules allow), ends with
`N passed, M failed`, and with exit code 0 only if none failed.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import math
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from fullstride.engine.anatomy import find, logits_of, units
from fullstride.engine.gathering import Gathering
from fullstride.engine.init import initialise, materialise, parameters_by_unit, places_of
from fullstride.engine.loss import IGNORED
from fullstride.engine.parity_adapters import adapt_by_hand
from fullstride.engine.parity_cases import Case, model_of
from fullstride.engine.parity_draws import draw, listed
from fullstride.engine.pieces import Piece, take
from fullstride.engine.precision import TORCH_DTYPE, local
from fullstride.engine.run import prepare
from fullstride.engine.schedule import learning_rate
from fullstride.files import Value, write_bytes

STEPS = 3
TOGETHER = 25
"""Drawn cases that share a group of processes: one that hangs takes no more of the others with it."""
BROKEN = "could not run:"
"""Begins the line of a case that raised."""
LOST = "lost:"
"""Begins the line of a rank that ended without a word of its own."""
FOLLOWS = ("Connection closed by peer", "Connection reset by peer")
"""What ranks say of another rank's end; listed after the reason."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far a Plan's numbers may stand from the reference's."""

    loss: float
    """Relative."""
    gradient: float
    """Of the tensor's largest entry."""
    norm: float
    """Relative."""
    weight: float
    """Of the learning rate."""


TOLERANCES = {
    "fp64": Tolerance(loss=1e-9, gradient=1e-9, norm=1e-9, weight=1e-6),
    "fp64 with norms in fp32": Tolerance(loss=1e-6, gradient=1e-5, norm=1e-5, weight=1e-2),
    "fp32": Tolerance(loss=1e-6, gradient=2e-5, norm=1e-5, weight=0.1),
}
"""The one table of tolerances. The middle row is for models that widen norms or angles to fp32 themselves."""


class Outcome(Value, frozen=True, kw_only=True):
    """What came of a case."""

    name: str
    errors: tuple[str, ...]
    """Empty if it passed."""
    lost: tuple[str, ...] = ()
    """What a first group of processes said, of which a rank was lost, so that a second one was asked."""


class Record(dict[str, torch.Tensor]):
    """Numbers of a run by name: `loss/STEP`, `norm/STEP`, `gradient/STEP/NAME`, `weight/NAME`.

    Attributes:
        before: weights before each step but the first, as `STEP/NAME`; kept in fp32.
    """

    def __init__(self, *args: Any) -> None:
        """As a dict."""
        super().__init__(*args)
        self.before: dict[str, torch.Tensor] = {}


def batches(case: Case) -> list[dict[str, torch.Tensor]]:
    """The world's samples for each step: random tokens, labels masked unevenly, one sample in four not counted at all."""
    generator = torch.Generator().manual_seed(case.seed)
    samples, length = case.plan.workload.samples_per_step, case.plan.workload.sequence_length
    made = []
    for _ in range(STEPS):
        ids = torch.randint(0, case.vocab, (samples, length), generator=generator)
        keep = torch.rand((samples, length), generator=generator) < torch.rand((samples, 1), generator=generator)
        keep[:: 4 if samples > 1 else 2] = False
        keep[-1, -3:] = True
        made.append({"input_ids": ids, "labels": torch.where(keep, ids, IGNORED)})
    return made


def fresh_model(case: Case) -> nn.Module:
    """The unmodified model with its initial weights, whole, on the CPU."""
    model = model_of(case)
    dtype = TORCH_DTYPE[case.plan.precision.master]
    places, parts = places_of(model), units(model, find(model, case.plan.model))
    for unit, old in zip(parts, parameters_by_unit(parts), strict=True):
        made = materialise(old, places, torch.device("cpu"), dtype)
        initialise(model, unit, {id(p) for p in made.values()}, places, case.plan.recipe.seed)
    return model.train()


def reference(case: Case, before: dict[str, torch.Tensor] | None = None) -> Record:
    """The plain loop: one process, all samples at once.

    Args:
        case: what to run.
        before: weights to go on from in later steps, as in `Record`; by default its own.
    """
    model, recipe, found = fresh_model(case), case.plan.recipe, Record()
    if case.plan.adapter.rank:
        adapt_by_hand(model, case.plan)
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, foreach=False
    )
    for step, batch in enumerate(batches(case)):
        if before and step:
            for name, param in named.items():
                param.data.copy_(before[f"{step}/{name}"])
        logits = logits_of(model(batch["input_ids"]))[:, :-1]
        target = batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        found |= {f"gradient/{step}/{n}": p.grad.clone() for n, p in named.items() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm or math.inf)
        found[f"loss/{step}"], found[f"norm/{step}"] = loss.detach(), norm.detach()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"weight/{n}": p.detach() for n, p in named.items()}
    return found


def planned(case: Case) -> Record:
    """The same through the Plan, on this rank; all ranks must call it."""
    run, found = prepare(model_of(case), case.plan, device="cpu"), Record()
    update, weights = run._update, run._weights

    gathering, dtype = Gathering(run.pieces(), run.device), TORCH_DTYPE[case.plan.precision.master]

    def spy() -> tuple[torch.Tensor, float]:
        grads = {name: grad for i, name in enumerate(weights.names) if (grad := weights.gradient(i)) is not None}
        found.update({f"gradient/{run.step_index}/{n}": g for n, g in gathering.all(grads, dtype)})
        if dtype == torch.float32 and run.step_index:
            masters = dict(zip(weights.names, weights.masters, strict=True))
            found.before |= {f"{run.step_index}/{n}": w for n, w in gathering.all(masters, dtype)}
        return update()

    run._update = spy  # type: ignore[method-assign]
    for step, batch in enumerate(batches(case)):
        out = run.step({name: tensor[share(case, run.data_rank)] for name, tensor in batch.items()})
        found[f"loss/{step}"] = torch.tensor(out.loss, dtype=torch.float64)
        found[f"norm/{step}"] = torch.tensor(out.grad_norm, dtype=torch.float64)
    state = run.state()
    masters = {key.removeprefix("weights/"): value for key, value in state.items() if key.startswith("weights/")} | run.frozen()
    found.update({f"weight/{n}": w for n, w in gathering.all(masters, dtype)})
    drifted = _drifted(run.pieces(), masters, found)
    run.close()
    if drifted:
        raise AssertionError(f"ranks hold different copies of {', '.join(drifted[:4])}")
    return found


def _drifted(pieces: dict[str, Piece], masters: dict[str, torch.Tensor], found: Record) -> list[str]:
    """Parameters of which this rank's elements are not, to the last bit, those of the rank that counts them."""
    odd = []
    for name, master in masters.items():
        mine = local(master).reshape(-1)
        other = torch.empty_like(mine)
        take(found[f"weight/{name}"].to(mine.dtype), pieces[name], other)
        if not torch.equal(mine, other):
            odd.append(name)
    return odd


def share(case: Case, data_rank: int) -> slice:
    """The samples of a step that a data-parallel rank takes."""
    count = case.plan.batch.micro_batch * case.plan.batch.accumulation
    return slice(data_rank * count, (data_rank + 1) * count)


def differences(case: Case, wanted: Record, found: Record) -> tuple[str, ...]:
    """One line for each number that strays; empty if none does."""
    precise = case.plan.precision.master == "fp64"
    limit = TOLERANCES["fp32" if not precise else "fp64 with norms in fp32" if case.widens else "fp64"]
    errors = []
    if set(wanted) != set(found):
        odd = sorted(set(wanted) ^ set(found))
        errors.append(f"only on one side: {', '.join(odd[:4])}")
    for key in sorted(set(wanted) & set(found)):
        kind, name = key.split("/")[0], key.split("/", 1)[1]
        apart = (wanted[key].double() - found[key].double()).abs()
        if kind == "weight":
            apart = torch.where(_determined(wanted, name, limit), apart, 0.0)
        away = float(apart.max())
        size = float(wanted[key].double().abs().max())
        allowed = getattr(limit, kind) * (case.plan.recipe.learning_rate if kind == "weight" else size)
        if kind == "weight" and case.plan.adapter.rank and not name.endswith(("lora_A.weight", "lora_B.weight")):
            allowed = 0.0  # frozen
        if not away <= allowed:  # NaN fails too
            errors.append(f"{key}: off by {away:.3g}, allowed {allowed:.3g}")
    return tuple(errors)


def _determined(wanted: Record, name: str, limit: Tolerance) -> torch.Tensor:
    """Entries of a weight whose gradient stands clear of rounding in every step.

    Adam divides by the gradient's own size: where exact arithmetic gives zero (the bias of keys, say, to which softmax is
    blind) the update is rounding noise blown up to the learning rate, in the reference as well.
    """
    clear = torch.ones_like(wanted[f"weight/{name}"], dtype=torch.bool)
    for step in range(STEPS):
        grad = wanted.get(f"gradient/{step}/{name}")
        if grad is not None:
            clear &= (grad == 0) | (grad.abs() > 10 * limit.gradient * grad.abs().max())
    return clear


def _told_reference(case: Case) -> Record:
    """The reference, made by the first rank and told to the others, which would only make the same again."""
    if not dist.is_initialized():
        return reference(case)
    told: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            told[0] = reference(case)
        except Exception as error:  # the other ranks wait for a word
            told[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(told)
    if told[0] is None:
        raise RuntimeError(f"the reference: {told[1]}")
    made: Record = told[0]
    return made


def _require_finite(wanted: Record) -> None:
    odd = next((key for key, value in wanted.items() if not bool(value.isfinite().all())), "")
    if odd:
        raise ValueError(f"the reference's own {odd} is not finite: there is nothing to compare with")


def _from_there(case: Case, wanted: Record, found: Record) -> Record:
    """The reference's numbers with those of later steps taken at the Plan's own weights.

    In fp32 weights may stand 0.1 lr apart after a step (where a gradient is all rounding, Adam makes a tenth of a step of it),
    and gradients after it by more than their own tolerance, without anything being wrong. The weights at the end are still
    those of a loop that was its own throughout.
    """
    there = reference(case, found.before)
    return Record({**wanted, **{key: value for key, value in there.items() if not key.startswith("weight/")}})


def check_case(case: Case) -> tuple[str, ...]:
    """Run a case on this rank and compare: one line for each number that strays here. Raises what the run raised."""
    wanted = _told_reference(case)
    _require_finite(wanted)
    found = planned(copy.deepcopy(case))
    errors = differences(case, wanted, found)
    if errors and case.plan.precision.master == "fp32":
        errors = differences(case, _from_there(case, wanted, found), found)
    return errors


def run_cases(cases: tuple[Case, ...], ranks: int, *, timeout_seconds: float = 240.0) -> tuple[Outcome, ...]:
    """Run cases made for `ranks` ranks in one group of fresh processes.

    A case that a rank does not come back from ends its group; the cases after it get a new one. Where a rank was lost without
    a word of its own (killed from outside, say), the case is asked once more, and its outcome and a warning say so.
    """
    deadline, outcomes = time.monotonic() + timeout_seconds, list[Outcome]()
    while len(outcomes) < len(cases) and time.monotonic() < deadline:
        outcomes += _run_group(cases[len(outcomes) :], ranks, deadline)
        last = outcomes[-1]
        if _lost_a_rank(last) and time.monotonic() < deadline:
            outcomes[-1] = replace(_run_group((cases[len(outcomes) - 1],), ranks, deadline)[0], lost=last.errors)
            warnings.warn(f"{last.name}: a rank was lost; asked again. {last.errors}", stacklevel=2)
    late = (f"not run: no time left of {timeout_seconds:.0f} s",)
    return (*outcomes, *(Outcome(name=case.name, errors=late) for case in cases[len(outcomes) :]))


def _lost_a_rank(outcome: Outcome) -> bool:
    """Whether nothing is known but that a rank is gone."""
    return outcome.errors != () and all(LOST in line or _follows(line) for line in outcome.errors)


def _follows(line: str) -> bool:
    return any(words in line for words in FOLLOWS)


def _run_group(cases: tuple[Case, ...], ranks: int, deadline: float) -> list[Outcome]:
    """The outcomes of the first cases, at least one: those that all ranks finished, and the one that broke the group."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cases.json").write_bytes(msgspec.json.encode(cases))
        command = [sys.executable, "-m", "fullstride.engine.parity", "--ranks", str(ranks), "--folder", folder]
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        ends = [_end(process, deadline) for process in processes]
        outcomes: list[Outcome] = []
        for index, case in enumerate(cases):
            found = [_lines(Path(folder, f"errors-{index:04d}-{rank}")) for rank in range(ranks)]
            lines = [(end,) if mine is None else mine for mine, end in zip(found, ends, strict=True)]
            said = [f"rank {rank}: {line}" for rank, mine in enumerate(lines) for line in mine]
            outcomes.append(Outcome(name=case.name, errors=tuple(sorted(said, key=_follows))))
            if None in found or any(BROKEN in line for line in said):
                break
    return outcomes


def _end(process: subprocess.Popen[str], deadline: float) -> str:
    """How a rank ended, waiting for it until the deadline."""
    try:
        _, text = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "no answer in time"
    return f"{LOST} exit code {process.returncode}: {text.strip()[-300:]}"


def _lines(path: Path) -> tuple[str, ...] | None:
    return msgspec.json.decode(path.read_bytes(), type=tuple[str, ...]) if path.exists() else None


def _work(folder: Path, rank: int, ranks: int) -> int:
    """What one of the processes does: a file of errors for each case, up to one that cannot run."""
    torch.set_num_threads(1)
    cases = msgspec.json.decode((folder / "cases.json").read_bytes(), type=tuple[Case, ...])
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=180),
        )
    for index, case in enumerate(cases):
        ended = False
        try:
            errors = check_case(case)
        except Exception as error:  # whatever it is, it is this case's; the ranks no longer stand at the same place
            errors, ended = (f"{BROKEN} {type(error).__name__}: {error}"[:500],), True
        write_bytes(folder / f"errors-{index:04d}-{rank}", msgspec.json.encode(errors))
        if ended:
            return 1
    if ranks > 1:
        dist.destroy_process_group()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m fullstride.engine.parity", description=__doc__)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    for name, least in (("draws", 0), ("ranks", 1)):
        if getattr(asked, name) < least:
            parser.error(f"argument --{name}: {getattr(asked, name)} is less than {least}")
    if asked.folder:
        return _work(Path(asked.folder), asked.rank, asked.ranks)
    drawn = draw(random.Random(asked.seed), asked.draws, asked.ranks)
    outcomes: list[Outcome] = []
    for begun in range(0, len(drawn.cases), TOGETHER):
        outcomes += run_cases(drawn.cases[begun : begun + TOGETHER], asked.ranks, timeout_seconds=60 + 20.0 * TOGETHER)
        for outcome in outcomes[begun:]:
            print("pass" if not outcome.errors else "FAIL", outcome.name, *outcome.errors[:3], sep="  ", flush=True)
    print(f"{len(drawn.reached)} pairs of settings reached:", *listed(drawn.reached), sep="\n  ")
    failed = sum(bool(outcome.errors) for outcome in outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
