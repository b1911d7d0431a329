"""Wrong numbers without an error, as users of other run-times met them: each is a test of its own here.

The cases run on four ranks at once, and each test reads what became of its own.
"""

import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from msgspec.structs import replace

from fullstride.engine.parity import batches, fresh_model, run_cases, share
from fullstride.engine.parity_cases import make_case, model_of
from fullstride.engine.run import prepare
from fullstride.errors import RuleBroken
from fullstride.plan.plan import Loss, Precision, Recompute

CHUNKS = Loss(kind="chunked", chunk_tokens=7)
WHOLE = Recompute(mode="full")

FAULTS = {
    # The norm that clips: every shard once, every copy once, whoever holds it.
    "clip_norm_counts_weights_cut_by_tensor_parallelism_once": make_case("gpt2", tp=4),
    "clip_norm_counts_repeated_key_value_heads_once": make_case("llama", tp=4, changes={"num_key_value_heads": 1}),
    "clip_norm_counts_experts_once": make_case("qwen2_moe", tp=2, ranks=2, stage=2, dtype="fp32", micro_batch=1),
    "clip_norm_of_replicated_data_parallelism": make_case("modular", ranks=4, micro_batch=1),
    "clip_norm_of_sharded_data_parallelism_is_no_shards_own": make_case("modular", ranks=4, stage=3, micro_batch=1),
    "clip_norm_of_hybrid_sharding": make_case("modular", ranks=4, stage=2, replicate=2, micro_batch=1),
    "clip_norm_of_flat_buffers_with_tensor_parallelism": make_case("modular", ranks=2, stage=2, carrier="flat", tp=2),
    # Vocabularies that divide by nothing, cut and tied.
    "loss_with_a_vocabulary_that_does_not_divide": make_case("llama", tp=4, changes={"vocab_size": 59}),
    "tied_table_with_a_vocabulary_that_does_not_divide": make_case("gpt2", tp=4, tied=True, loss=CHUNKS),
    # What is whole beside what is cut.
    "norms_between_cut_regions_get_their_whole_gradient": make_case("llama", tp=4, accumulation=3),
    "biases_of_row_products_are_added_once": make_case("gpt2", tp=4, sequence_parallel=False),
    "norms_over_all_heads_see_all_heads": make_case("olmo2", tp=4, accumulation=3),
    "norms_by_head_get_the_gradient_of_all_heads": make_case("qwen3", tp=4, sequence_parallel=False),
    "routers_get_the_gradient_of_all_ranks": make_case("mixtral", tp=4, dtype="fp32", accumulation=3),
    "latent_projections_get_the_gradient_of_all_heads": make_case("deepseek_v3", tp=4, dtype="fp32", sequence_parallel=False),
    # The loss is a mean over tokens, however they are cut.
    "ragged_batches_cut_over_ranks_and_micro_batches": make_case("modular", tp=2, ranks=2, accumulation=3, micro_batch=1),
    "ragged_batches_in_chunks": make_case("gpt2", tp=2, ranks=2, stage=1, accumulation=3, micro_batch=1, loss=CHUNKS),
    # Recomputed blocks make the same numbers.
    "recomputation_with_tensor_parallelism_and_a_pipeline": make_case(
        "modular", tp=2, pp=2, accumulation=3, recompute=WHOLE, layers_per_stage=(2, 1)
    ),
}


@pytest.fixture(scope="module")
def outcomes():
    found = run_cases(tuple(FAULTS.values()), 4, timeout_seconds=500)
    return dict(zip(FAULTS, found, strict=True))


@pytest.mark.timeout(900)
@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_known_fault(fault, outcomes):
    """Loss, gradients, norm and weights are those of one process; copies of a weight stay equal to the last bit."""
    assert not outcomes[fault].errors


# What a comparison in one dtype does not see.


def narrow(case):
    cast = Precision(cast="weights", embedding="bf16", block="bf16", head="bf16")
    return replace(case, plan=replace(case.plan, precision=cast))


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {
        "masters": masters_of_narrow_weights(),
        "frozen": frozen_weights(),
        "by_hand": by_hand(),
        "evaluated": evaluated(),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def steps(case, run):
    return [run.step({n: t[share(case, run.data_rank)] for n, t in batch.items()}) for batch in batches(case)]


def masters_of_narrow_weights():
    told = {}
    for name, case in {
        "cut": narrow(make_case("llama", tp=2, dtype="fp32")),
        "sharded": narrow(make_case("llama", ranks=2, stage=3, dtype="fp32")),
        "flat": narrow(make_case("llama", ranks=2, stage=2, carrier="flat", dtype="fp32")),
    }.items():
        run = prepare(model_of(case), case.plan, device="cpu")
        results = steps(case, run)
        told[name] = {
            "dtypes": sorted({str(t.dtype) for t in run.state().values()}),
            "losses": [r.loss for r in results],
            "finite": all(math.isfinite(r.grad_norm) for r in results),
        }
        run.close()
    return told


def frozen_weights():
    """Whole and cut weights that are not trained stay; the others move, and copies stay equal."""
    case = make_case("llama", tp=2)
    model = model_of(case)
    frozen = [n for n, p in model.named_parameters() if "q_proj" in n or "input_layernorm" in n or "embed" in n]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    run = prepare(model, case.plan, device="cpu")
    before = {n.removeprefix("weights/"): t.clone() for n, t in run.state().items() if n.startswith("weights/")}
    results = steps(case, run)
    after = {n.removeprefix("weights/"): t for n, t in run.state().items() if n.startswith("weights/")}
    moved = [n for n in before if not torch.equal(before[n], after[n])]
    told = {"moved": sorted(moved), "all": sorted(before), "frozen": frozen, "norms": [r.grad_norm for r in results]}
    run.close()
    return told


def by_hand():
    case = make_case("llama", tp=2)
    run = prepare(model_of(case), case.plan, device="cpu")
    said = []
    for what in ("model", "optimizer"):
        try:
            getattr(run, what)
        except RuleBroken as error:
            said.append(error.message)
    run.close()
    return said


def evaluated():
    told = []
    for loss in (Loss(), CHUNKS):
        case = make_case("llama", tp=2, loss=loss)
        run = prepare(model_of(case), case.plan, device="cpu")
        told.append(run.evaluate(batches(case)[0]))
        run.close()
    return told


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    mp.spawn(work, args=(folder,), nprocs=2)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.timeout(900)
@pytest.mark.multi
@pytest.mark.slow
def test_masters_stay_fp32_where_weights_compute_in_bf16(ranks):
    for found in ranks:
        for told in found["masters"].values():
            assert told["dtypes"] == ["torch.float32"]
            assert told["finite"]
    losses = [found["masters"][name]["losses"] for found in ranks for name in ("cut", "sharded", "flat")]
    assert ranks[0]["masters"]["cut"]["losses"] == ranks[1]["masters"]["cut"]["losses"]
    case = make_case("llama", dtype="fp32")
    with torch.no_grad():
        batch = batches(make_case("llama", tp=2, dtype="fp32"))[0]
        logits = fresh_model(case)(batch["input_ids"]).logits[:, :-1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    assert losses[0][0] == pytest.approx(float(wanted), rel=0.02)


@pytest.mark.timeout(900)
@pytest.mark.multi
@pytest.mark.slow
def test_frozen_weights_stay_and_count_nowhere(ranks):
    for found in ranks:
        told = found["frozen"]
        assert set(told["moved"]) == set(told["all"]) - set(told["frozen"])
    assert ranks[0]["frozen"]["norms"] == ranks[1]["frozen"]["norms"]
    case = make_case("llama", tp=2)
    model, batch = fresh_model(case), batches(case)[0]
    for name in ranks[0]["frozen"]["frozen"]:
        model.get_parameter(name).requires_grad_(False)
    logits = model(batch["input_ids"]).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], math.inf)
    assert ranks[0]["frozen"]["norms"][0] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.timeout(900)
@pytest.mark.multi
@pytest.mark.slow
def test_loops_by_hand_are_refused_where_logits_are_parts(ranks):
    for found in ranks:
        assert [line.split(":")[0] for line in found["by_hand"]] == [
            "run.model with layout.tp = 2",
            "run.optimizer with layout.tp = 2",
        ]


@pytest.mark.timeout(900)
@pytest.mark.multi
@pytest.mark.slow
def test_held_out_loss_is_that_of_one_process(ranks):
    assert ranks[0]["evaluated"] == ranks[1]["evaluated"]
    case = make_case("llama", tp=2)
    batch = batches(case)[0]
    with torch.no_grad():
        logits = fresh_model(case)(batch["input_ids"]).logits[:, :-1]
    target = batch["labels"][:, 1:].flatten()
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target, ignore_index=-100, reduction="sum")
    for total, tokens in ranks[0]["evaluated"]:
        assert total == pytest.approx(float(wanted), rel=1e-6)
        assert tokens == int((target != -100).sum())
