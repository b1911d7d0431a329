"""Real runs: a checkpoint that one layout wrote goes on under any other, with the losses of a run that was never cut."""

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fullstride.engine.build import build_model, from_config
from fullstride.engine.checkpoint import load_run, save_run
from fullstride.engine.export import export
from fullstride.engine.run import prepare
from fullstride.plan.plan import Batch, Layout, ModelRef, Pipeline, Plan, Precision, Recipe, Shard, Workload

pytestmark = [pytest.mark.multi, pytest.mark.slow]

SAMPLES, LENGTH, CUT, STEPS = 4, 12, 2, 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 61,
    "initializer_range": 0.2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
ROLES = ("embedding", "block", "head", "loss", "gradient", "reduction", "master", "optimizer_state")


def precision(dtype):
    return Precision(**dict.fromkeys(ROLES, dtype))


PLAN = Plan(
    model=ModelRef(source="in memory"),
    workload=Workload(sequence_length=LENGTH, samples_per_step=SAMPLES),
    recipe=Recipe(steps=STEPS, learning_rate=1e-2, warmup_steps=2, clip_norm=0.5),
    batch=Batch(micro_batch=1, accumulation=SAMPLES),
    precision=precision("fp64"),
)


def plan_of(shard=None, **axes):
    layout = Layout(**axes)
    return msgspec.structs.replace(
        PLAN,
        layout=layout,
        shard=shard or Shard(carrier="none", stage=0),
        batch=Batch(micro_batch=1, accumulation=SAMPLES // layout.data_parallel),
        pipeline=Pipeline(schedule="1f1b") if layout.pp > 1 else Pipeline(),
    )


ONE = plan_of()
LAYOUTS = {
    "ddp 4": plan_of(Shard(carrier="ddp", stage=0), dp_replicate=4),
    "fsdp2 4": plan_of(Shard(carrier="fsdp2", stage=3), dp_shard=4),
    "hybrid 2 x 2": plan_of(Shard(carrier="fsdp2", stage=2), dp_replicate=2, dp_shard=2),
    "flat 4": plan_of(Shard(carrier="flat", stage=3), dp_shard=4),
    "pp 2 fsdp2 2": plan_of(Shard(carrier="fsdp2", stage=1), pp=2, dp_shard=2),
    "pp 2 flat 2": plan_of(Shard(carrier="flat", stage=2), pp=2, dp_shard=2),
    "tp 4": plan_of(tp=4),
    "tp 2 fsdp2 2": plan_of(Shard(carrier="fsdp2", stage=3), tp=2, dp_shard=2),
    "tp 2 flat 2": plan_of(Shard(carrier="flat", stage=3), tp=2, dp_shard=2),
    "pp 2 tp 2": plan_of(pp=2, tp=2),
}
SPARSE = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "tie_word_embeddings": False}
DIRECTORIES = {  # mixtures of experts, whose files keep every expert apart, and the layout that loads and exports them
    "hybrid 2 x 2": {**CONFIG, **SPARSE, "model_type": "mixtral", "intermediate_size": 16, "num_local_experts": 3},
    "pp 2 fsdp2 2": {
        **CONFIG,
        **SPARSE,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def batch(step, run):
    """This rank's share of the global samples of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, CONFIG["vocab_size"], (SAMPLES, LENGTH), generator=generator)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.7, ids, -100)
    each = SAMPLES // run.plan.layout.data_parallel
    mine = slice(run.data_rank * each, (run.data_rank + 1) * each)
    return {"input_ids": ids[mine], "labels": labels[mine]}


def begin(plan):
    return prepare(from_config(CONFIG, "tiny"), plan, device="cpu")


def losses(run, first, last):
    return [run.step(batch(step, run)).loss for step in range(first, last)]


def close(found, wanted):
    return all(abs(f - w) <= 1e-6 * w for f, w in zip(found, wanted, strict=True))


def work(rank, folder, wanted):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    before = "one"
    for name, plan in LAYOUTS.items():
        run = begin(plan)
        assert close(losses(run, 0, CUT), wanted[:CUT]), name
        save_run(run, folder / name)
        load_run(run, folder / before)
        assert run.step_index == CUT
        found = losses(run, CUT, STEPS)
        assert close(found, wanted[CUT:]), f"{before} -> {name}: {found} {wanted[CUT:]}"
        load_run(run, folder / "one")
        save_run(run, folder / f"{name} again")
        export(run, folder / f"{name} model")
        run.close()
        before = name
    for name in DIRECTORIES:
        source = str(folder / f"source {name}")
        single = dict.fromkeys(
            ("embedding", "block", "head", "loss", "gradient", "reduction", "master", "optimizer_state"), "fp32"
        )
        plan = msgspec.structs.replace(LAYOUTS[name], model=ModelRef(source=source), precision=Precision(**single))
        run = prepare(build_model(source), plan, device="cpu")
        export(run, folder / f"out {name}")
        run.close()
    run = begin(LAYOUTS["fsdp2 4"])
    load_run(run, folder / before)
    assert close(losses(run, CUT, STEPS), wanted[CUT:]), f"{before} -> fsdp2 4"
    dist.destroy_process_group()


def save_directory(config, folder):
    """As transformers saves it, in bf16, with random values in every parameter and in the router's bias."""
    kept = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **kept))
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(torch.rand(value.shape, generator=torch.Generator().manual_seed(len(name))))
    model.to(torch.bfloat16).save_pretrained(folder)


def check_one_rank_goes_on_from_every_layout(folder, wanted):
    run = begin(ONE)
    for name in LAYOUTS:
        load_run(run, folder / name)
        found = losses(run, CUT, STEPS)
        assert close(found, wanted[CUT:]), f"{name} -> one: {found} {wanted[CUT:]}"


def check_what_a_layout_read_and_wrote_again_is_bit_equal(folder):
    run = begin(ONE)
    load_run(run, folder / "one")
    first = {key: value.clone() for key, value in run.state().items()}
    for name in LAYOUTS:
        load_run(run, folder / f"{name} again")
        assert all(torch.equal(first[key], value) for key, value in run.state().items()), name


def check_every_layout_exports_the_same_model(folder):
    wanted = load_file(folder / "one model" / "model.safetensors")
    for name in LAYOUTS:
        found = load_file(folder / f"{name} model" / "model.safetensors")
        assert set(found) == set(wanted), name
        assert all(torch.equal(found[key], value) for key, value in wanted.items()), name


def check_mixtures_come_back_bit_for_bit_from_several_ranks(folder):
    for name in DIRECTORIES:
        wanted, found = (load_file(folder / f"{kind} {name}" / "model.safetensors") for kind in ("source", "out"))
        assert set(found) == set(wanted), name
        assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in wanted.items()), name
        AutoModelForCausalLM.from_pretrained(folder / f"out {name}")


def test_every_layout_goes_on_from_another_with_the_losses_of_a_run_that_was_never_cut(tmp_path):
    """One rank's run, cut by a checkpoint, and then every layout's, each resumed from what the one before it wrote."""
    run = begin(ONE)
    wanted = losses(run, 0, CUT)
    save_run(run, tmp_path / "one")
    export(run, tmp_path / "one model")
    wanted += losses(run, CUT, STEPS)
    for name, config in DIRECTORIES.items():
        save_directory(config, tmp_path / f"source {name}")
    mp.spawn(work, args=(tmp_path, wanted), nprocs=4)
    check_one_rank_goes_on_from_every_layout(tmp_path, wanted)
    check_what_a_layout_read_and_wrote_again_is_bit_equal(tmp_path)
    check_every_layout_exports_the_same_model(tmp_path)
    check_mixtures_come_back_bit_for_bit_from_several_ranks(tmp_path)
