"""Law 2: loss, gradients, norm and weights are those of a plain loop with the unmodified model, whatever the Plan."""

import contextlib
import random

import pytest
import torch
from msgspec.structs import replace

from fullstride.engine import parity
from fullstride.engine.parity import Outcome, Record, _require_finite, differences, fresh_model, main, reference, run_cases
from fullstride.engine.parity_cases import make_case
from fullstride.engine.parity_draws import SETTINGS, all_pairs, draw, draw_cases, listed, settings_of
from fullstride.plan.plan import Loss, Recompute

FULL, PART = Recompute(mode="full"), Recompute(mode="norm_activation")
CHUNKS = Loss(kind="chunked", chunk_tokens=7)

CASES = {
    1: (
        make_case("llama", dtype="fp32", accumulation=3, recompute=PART, loss=CHUNKS),
        make_case("gpt2", tied=True, accumulation=3, recompute=FULL),
        make_case("gpt2", loss=CHUNKS, recompute=Recompute(mode="norm_activation", every=2)),
        make_case("plain", accumulation=3, loss=CHUNKS),
        make_case("plain", tied=True, recompute=PART, loss=CHUNKS, seed=3),
        make_case("gemma", tied=True, loss=CHUNKS),
        make_case("mixtral", dtype="fp32", recompute=FULL),
        make_case("phi", dtype="fp32", loss=CHUNKS),
    ),
    2: (
        make_case("gpt2", tied=True, ranks=2, accumulation=3),
        make_case("gpt2", tied=True, ranks=2, stage=1, accumulation=3, recompute=PART, loss=CHUNKS),
        make_case("gpt2", tied=True, ranks=2, stage=2, accumulation=3, recompute=FULL),
        make_case("plain", ranks=2, stage=3, accumulation=3, recompute=FULL, loss=CHUNKS),
        make_case("llama", ranks=2, stage=3, recompute=PART, reshard={"blocks": False, "head": False}),
        make_case("qwen3", tied=True, ranks=2, stage=3, dtype="fp32", reshard={"model.layers.1": False}),
        make_case("mixtral", ranks=2, stage=2, accumulation=3, dtype="fp32"),
    ),
    3: (
        make_case("plain", ranks=3, accumulation=3, micro_batch=1),
        make_case("plain", tied=True, ranks=3, stage=1, accumulation=3, micro_batch=1),
        make_case("plain", ranks=3, stage=2, micro_batch=1, recompute=PART),
        make_case("gpt2", tied=True, ranks=3, stage=3, micro_batch=1, accumulation=3, loss=CHUNKS),
    ),
    4: (
        make_case("plain", ranks=4, micro_batch=1),
        make_case("plain", ranks=4, stage=1, replicate=2, accumulation=3, micro_batch=1),
        make_case("gpt2", tied=True, ranks=4, stage=2, replicate=2, accumulation=3, micro_batch=1),
        make_case("plain", tied=True, ranks=4, stage=3, replicate=2, accumulation=3, micro_batch=1, loss=CHUNKS),
        make_case("plain", ranks=4, stage=3, micro_batch=1, recompute=FULL),
    ),
}


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted(CASES))
def test_plans_equal_a_plain_loop(ranks):
    outcomes = run_cases(CASES[ranks], ranks)
    assert len(outcomes) == len(CASES[ranks])
    assert not [(o.name, o.errors) for o in outcomes if o.errors]


def test_a_number_that_strays_is_named():
    case = make_case("plain", dtype="fp32")
    grad, weight = torch.tensor([1.0, 0.5, 1e-9]), torch.tensor([1.0, 2.0, 3.0])
    good = Record({"loss/0": torch.tensor(2.0), "gradient/0/w": grad, "weight/w": weight})
    assert differences(case, good, good) == ()
    off = Record({**good, "loss/0": torch.tensor(2.00001), "gradient/0/w": grad + 1e-4, "weight/w": weight + 0.002})
    assert [line.split(":")[0] for line in differences(case, good, off)] == ["gradient/0/w", "loss/0", "weight/w"]
    assert differences(case, good, Record({**good, "loss/0": torch.tensor(float("nan"))}))
    noise = Record({**good, "weight/w": weight + torch.tensor([0.0, 0.0, 0.01])})
    assert differences(case, good, noise) == ()  # its gradient is below rounding
    assert "only on one side" in differences(case, good, Record({"loss/0": good["loss/0"]}))[0]


@pytest.mark.multi
@pytest.mark.slow
def test_a_case_that_cannot_run_takes_no_other_with_it():
    good = make_case("plain", ranks=2, micro_batch=1)
    cases = (good, replace(good, name="no such family", family="gone"), replace(good, name="after it", seed=1))
    before, broken, after = run_cases(cases, 2)
    assert (before.errors, after.errors) == ((), ())
    assert [line.split(": ", 2)[:2] for line in broken.errors] == [["rank 0", "could not run"], ["rank 1", "could not run"]]


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        (["rank 1: lost: exit code -9: ", "rank 0: could not run: RuntimeError: Connection closed by peer"], 2),
        (["rank 0: could not run: RuntimeError: Connection closed by peer"], 2),
        (["rank 0: loss/0: off by 1, allowed 0.1"], 1),
        (["rank 1: lost: exit code -6: ", "rank 0: could not run: ValueError: no"], 1),
        (["rank 1: could not run: ValueError: no", "rank 0: could not run: RuntimeError: Connection closed by peer"], 1),
    ],
)
def test_a_lost_rank_is_asked_once_more_and_nothing_else_is(said, asked, monkeypatch):
    case, groups = make_case("plain", ranks=2, micro_batch=1), []
    answers = [Outcome(name=case.name, errors=tuple(said)), Outcome(name=case.name, errors=())]
    monkeypatch.setattr(parity, "_run_group", lambda *_: groups.append(1) or [answers[len(groups) - 1]])
    with pytest.warns(UserWarning, match="a rank was lost") if asked == 2 else contextlib.nullcontext():
        (outcome,) = run_cases((case,), 2)
    assert len(groups) == asked
    assert (outcome.errors, outcome.lost) == (((), tuple(said)) if asked == 2 else (tuple(said), ()))


@pytest.mark.timeout(900)
@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "count"), [(2, 20), (4, 10)])
def test_thirty_drawn_plans_equal_a_plain_loop(ranks, count):
    outcomes = run_cases(draw_cases(random.Random(5), count, ranks), ranks, timeout_seconds=400)
    assert len(outcomes) == count
    assert not [(o.name, o.errors) for o in outcomes if o.errors]


def test_later_steps_can_be_taken_from_the_weights_of_a_plan():
    case = make_case("plain", dtype="fp32")
    wanted = reference(case)
    away = {f"{step}/{n}": v + 0.01 for step in (1, 2) for k, v in wanted.items() if k.startswith("weight/") for n in [k[7:]]}
    there = reference(case, away)
    name = next(key for key in wanted if key.startswith("gradient/1/"))
    assert torch.equal(there[name.replace("/1/", "/0/")], wanted[name.replace("/1/", "/0/")])
    assert not torch.allclose(there[name], wanted[name], rtol=1e-3)
    found = Record({**wanted, name: there[name]})
    assert differences(case, wanted, found)
    assert differences(case, there, Record({**there, "weight/" + name[11:]: wanted["weight/" + name[11:]]}))


def test_draws_reach_every_pair_of_settings_that_the_rules_allow():
    drawn = draw(random.Random(0), 0, 4)
    assert drawn.waiting == ()
    assert len(drawn.cases) <= 230
    # A pair that was given up was met by no case of another seed either.
    others = draw(random.Random(1), 60, 4)
    assert others.reached <= drawn.reached
    assert drawn.reached < set(all_pairs())
    assert len(listed(drawn.reached)) > 100


def test_settings_that_say_nothing_do_not_count_as_reached():
    choice = {name: values[0] for name, values in SETTINGS.items()}
    assert {"sequence", "schedule", "even", "stage", "replicate", "reshard", "every"}.isdisjoint(dict(settings_of(choice, 2)))
    found = settings_of({**choice, "carrier": "flat", "stage": 3, "tp": 2}, 4)
    assert {("sequence", True), ("stage", 3), ("reshard", "all"), ("replicate", 1)} <= found


def test_draws_are_decided_by_the_seed():
    first, again, other = (draw_cases(random.Random(seed), 5, 2) for seed in (1, 1, 2))
    assert first == again != other


def test_a_reference_that_is_not_finite_is_no_reference():
    _require_finite(Record({"loss/0": torch.tensor(1.0)}))
    with pytest.raises(ValueError, match="the reference's own loss/1 is not finite"):
        _require_finite(Record({"loss/0": torch.tensor(1.0), "loss/1": torch.tensor(float("nan"))}))


def test_a_tied_head_with_a_bias_leaves_the_shared_weight_to_its_first_name():
    case = make_case("phi", tied=True)
    one, other = fresh_model(case), fresh_model(replace(case, tied=False))
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert torch.equal(one.lm_head.weight, other.model.embed_tokens.weight)
    assert torch.equal(one.lm_head.bias, other.lm_head.bias)


@pytest.mark.parametrize(
    ("words", "said"), [(["--draws", "-1"], "--draws: -1 is less than 0"), (["--ranks", "0"], "is less than 1")]
)
def test_counts_that_draw_nothing_are_refused(words, said, capfd):
    """No case passed is no pass."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert said in capfd.readouterr().err
