"""What each kind of file says, and that nothing of it is dropped."""

import json
import random
import re

import pytest
from tests.plan.formats import samples

from fullstride.errors import BadInput
from fullstride.model.presets import preset_config
from fullstride.model.source import load_spec
from fullstride.plan.formats import accelerate, deepspeed, torchtitan
from fullstride.plan.formats.detect import flat, kind_of_text, read_any, read_text
from fullstride.plan.formats.megatron_model import expert_pattern, model_options
from fullstride.plan.formats.table import Draft, carry, flatten
from fullstride.plan.plan import Layout, Pipeline, Recompute, Shard
from fullstride.plan.toml import plan_text


def listed(imported):
    return {one.key: one.why for one in imported.not_carried}


@pytest.mark.parametrize("kind", samples.ALL)
def test_kinds_are_told_by_content(kind):
    for text in samples.ALL[kind]:
        assert kind_of_text(text, "f") == kind


def test_a_plan_is_read_as_what_it_is(tmp_path):
    plan = read_text(samples.TORCHTITAN, "f", num_ranks=4).require_plan()
    path = tmp_path / "p.toml"
    path.write_text(plan_text(plan))
    read = read_any(str(path))
    assert (read.kind, read.plan, read.not_carried) == ("fullstride", plan, ())


def test_deepspeed_solves_the_ranks_from_the_batch():
    read = read_text(samples.DEEPSPEED_ZERO2, "f", "llama3-1b")
    plan = read.require_plan()
    assert plan.layout == Layout(dp_shard=8)
    assert plan.shard == Shard(carrier="deepspeed", stage=2)
    assert plan.optimizer.cpu_share == 1.0
    assert (plan.precision.cast, plan.precision.gradient, plan.precision.master) == ("weights", "bf16", "fp32")
    assert plan.overlap.bucket_bytes == 4 * 10**8, "2e8 elements of bf16"
    assert (plan.recipe.schedule, plan.recipe.steps, plan.recipe.clip_norm) == ("linear", 900, 1.0)
    assert "zero_optimization.allgather_bucket_size" in listed(read)
    assert any("sequence length 8192" in line for line in read.assumed)


def test_deepspeed_auto_is_listed_and_takes_no_default_of_its_own():
    read = read_text(samples.DEEPSPEED_AUTO, "f", "llama3-1b", num_ranks=4, sequence_length=512)
    plan = read.require_plan()
    autos = [one.key.rpartition(".")[2] for one in read.not_carried if one.value == "auto"]
    assert sorted(autos) == sorted(re.findall(r'"(\w+)": "auto"', samples.DEEPSPEED_AUTO))
    assert plan.recipe.clip_norm == 1.0, "DeepSpeed's own default would be none"
    assert plan.recipe.beta2 == 0.95
    assert plan.shard == Shard(carrier="deepspeed", stage=3)
    assert plan.precision.block == "fp16"
    assert "micro-batch 1, the file does not say" in read.assumed


@pytest.mark.parametrize(
    ("batch", "ranks", "cut"),
    [
        ({"train_batch_size": 32}, 4, (8, 1, 32)),
        ({"train_micro_batch_size_per_gpu": 3}, 4, (3, 1, 12)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, 4, (2, 4, 32)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 2, (2, 4, 16)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 4, (2, 4, 32)),
    ],
)
def test_deepspeed_batch_arithmetic_is_deepspeeds(batch, ranks, cut):
    plan = read_text(json.dumps(batch), "f", "tiny", num_ranks=ranks).require_plan()
    assert (plan.batch.micro_batch, plan.batch.accumulation, plan.workload.samples_per_step) == cut


def test_megatron_script():
    read = read_text(samples.MEGATRON_SCRIPT, "train.sh")
    plan = read.require_plan()
    assert plan.layout == Layout(dp_shard=4, tp=4, pp=2)
    assert plan.shard == Shard(carrier="megatron", stage=1)
    assert plan.pipeline == Pipeline(schedule="interleaved", chunks=4)
    assert (plan.batch.micro_batch, plan.batch.accumulation) == (1, 32)
    assert plan.recompute == Recompute(mode="full", blocks=3)
    assert plan.precision.block == "bf16", "the branch of the if that the script's own variable chooses"
    assert plan.precision.gradient == "fp32"
    assert plan.recipe.warmup_steps == 10
    assert plan.recipe.min_lr_ratio == pytest.approx(0.1)
    assert plan.recipe.beta2 == 0.95, "written with ="
    assert plan.comm.env == {"NCCL_IB_TIMEOUT": "22"}
    assert plan.kernels.gradient_fusion
    assert read.config["model_type"] == "llama"
    assert (read.config["num_key_value_heads"], read.config["vocab_size"]) == (8, 32256), "padded to 128 x tp"
    assert read.shape["vocab"] == 32000
    assert read.spec().hidden_size == 4096
    assert listed(read).keys() == {"--save", "--log-interval", "--split", "--master-addr", "CUDA_DEVICE_MAX_CONNECTIONS"}
    assert "--wandb-project" not in listed(read), "its branch is not taken"
    assert "--hidden-dropout" not in listed(read)


def test_megatron_case_in_yaml():
    read = read_text(samples.MEGATRON_CASE, "model_config.yaml", num_ranks=8)
    plan = read.require_plan()
    assert plan.layout == Layout(dp_shard=2, tp=2, pp=2, sequence_parallel=False, expert_tp=2)
    assert plan.kernels.attention == "fused_softmax"
    assert not plan.kernels.gradient_fusion
    assert not plan.overlap.gradients
    assert read.config == {}, "no family has experts without a gate"
    assert read.shape["experts"] == {"count": 8, "per_token": 2, "ffn": 2048, "shared_ffn": 0, "grouped": False}
    assert read.spec().family == "megatron-local"
    assert {"--deterministic-mode", "ENV_VARS.NVTE_ALLOW_NONDETERMINISTIC_ALGO", "TEST_TYPE", "--vocab-file"} <= listed(
        read
    ).keys()


def test_megatron_bridge_in_yaml():
    read = read_text(samples.MEGATRON_BRIDGE, "recipe.yaml")
    plan = read.require_plan()
    assert plan.layout == Layout(dp_shard=2, tp=4, pp=4, cp=2)
    assert plan.pipeline == Pipeline(schedule="interleaved", chunks=5)
    assert plan.batch.accumulation == 64
    assert plan.precision.block == "bf16"
    assert load_spec("llama3-70b").num_parameters == pytest.approx(read.spec().num_parameters, rel=1e-3)
    assert not read.not_carried


def test_torchtitan():
    read = read_text(samples.TORCHTITAN, "f", num_ranks=16)
    plan = read.require_plan()
    assert plan.model.source == "llama3-8b"
    assert plan.layout == Layout(dp_shard=8, tp=2)
    assert plan.shard == Shard(carrier="fsdp2", stage=3, reshard={"head": False})
    assert (plan.recompute.mode, plan.compile.mode) == ("full", "block")
    assert plan.precision.fp8 == "off", "the converter is not asked for"
    assert "quantize.linear.float8.filter_fqns" in listed(read)
    assert {"job.dump_folder", "checkpoint.interval", "training.dataset"} <= listed(read).keys()


def test_torchtitan_lays_blocks_on_stages_as_it_does_itself():
    text = samples.TORCHTITAN.replace("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 4").replace(
        "local_batch_size = 1", "local_batch_size = 8"
    )
    plan = read_text(text, "f", num_ranks=16).require_plan()
    assert plan.pipeline == Pipeline(schedule="1f1b", chunks=1, layers_per_stage=(8, 9, 8, 7)), "34 weights on 4 stages"
    assert (plan.batch.micro_batch, plan.batch.accumulation) == (1, 8)
    assert plan.shard.stage == 2, "with a pipeline, weights stay gathered"


def test_accelerate_hybrid_sharding_stays_inside_machines():
    plan = read_text(samples.ACCELERATE_FSDP1, "f", "llama3-1b").require_plan()
    assert plan.layout == Layout(dp_replicate=2, dp_shard=8)
    assert plan.shard == Shard(carrier="fsdp2", stage=3)
    assert (plan.recompute.mode, plan.precision.reduction) == ("full", "bf16")


def test_accelerate_axes_and_kept_weights():
    plan = read_text(samples.ACCELERATE_FSDP2, "f", "llama3-1b").require_plan()
    assert plan.layout == Layout(dp_replicate=2, dp_shard=2, tp=2)
    assert plan.shard == Shard(carrier="fsdp2", stage=2)


def test_accelerate_with_deepspeed_inside_and_in_a_file_of_its_own(tmp_path):
    inside = read_text(samples.ACCELERATE_DEEPSPEED, "f", "llama3-1b")
    plan = inside.require_plan()
    assert plan.shard == Shard(carrier="deepspeed", stage=2)
    assert (plan.optimizer.cpu_share, plan.batch.accumulation) == (1.0, 4)
    assert "fsdp_config.fsdp_offload_params" not in listed(inside)
    (tmp_path / "ds.json").write_text(samples.DEEPSPEED_ZERO2)
    own = tmp_path / "a.yaml"
    own.write_text("distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n")
    assert read_any(str(own), "llama3-1b").require_plan().workload.samples_per_step == 64
    own.write_text(own.read_text().replace("ds.json", "away.json"))
    assert "deepspeed_config.deepspeed_config_file" in listed(read_any(str(own), "llama3-1b"))


def leaves_of(kind, text):
    tables = {"deepspeed": deepspeed, "torchtitan": torchtitan, "accelerate": accelerate}
    return tables[kind].TABLE, tables[kind].parse(text, "f")


@pytest.mark.parametrize("kind", ["deepspeed", "torchtitan", "accelerate"])
def test_every_setting_ends_in_one_place(kind):
    """No leaf of a sample vanishes: it is an entry, a fact, at a value that asks for nothing, or on the list."""
    for text in samples.ALL[kind]:
        table, raw = leaves_of(kind, text)
        leaves = flatten(raw, {})
        draft = Draft(where="f", filled_in=True)
        carry(table, flatten(raw, table), draft)
        left = {one.key for one in draft.left}
        for key, value in leaves.items():
            row = table.get(key)
            carried = row is not None and (bool(row.target) or value in row.same)
            assert carried != (key in left) or value == "auto" or (row is not None and row.words is not None), key


@pytest.mark.parametrize("kind", samples.ALL)
def test_a_setting_nobody_knows_is_listed(kind):
    odd = {
        "deepspeed": samples.DEEPSPEED_ZERO2.replace("{", '{"fancy_new_thing": {"depth": 3},', 1),
        "megatron": samples.MEGATRON_SCRIPT.replace("--log-interval 10", "--fancy-new-thing 3"),
        "torchtitan": samples.TORCHTITAN.replace("[training]", "[training]\nfancy_new_thing = 3"),
        "accelerate": samples.ACCELERATE_FSDP2 + "fancy_new_thing: 3\n",
    }[kind]
    found = [
        one
        for one in read_text(odd, "f", "llama3-1b", num_ranks=8 if kind == "accelerate" else None).not_carried
        if "fancy" in one.key
    ]
    assert [one.value for one in found] == ["3"]
    assert found[0].matters


BAD = [
    (samples.DEEPSPEED_ZERO2[:200], "is not JSON", "complete"),
    (
        samples.DEEPSPEED_ZERO2.replace('"train_batch_size": 64', '"train_batch_size": 60'),
        "60 samples a step",
        "samples a step",
    ),
    (samples.DEEPSPEED_ZERO2.replace("zero_optimization", "zero_optimisation"), "zero_optimization.stage is", "correct"),
    (
        samples.DEEPSPEED_ZERO2.replace('"stage": 2', '"stage": "two"'),
        "two, which is not a whole number",
        "correct",
    ),
    ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}, "train_batch_size": 8}', "both enabled", "disable"),
    (samples.MEGATRON_SCRIPT.replace("TP=4", "TP=eight"), "eight", "correct"),
    (samples.MEGATRON_SCRIPT.replace("--global-batch-size 128", "--global-batch-size 127"), "127 samples a step", "change"),
    (samples.MEGATRON_SCRIPT.replace("stage 4 \\", "stage 5 \\"), "layers on 2 pipeline ranks with 5", "layers-per-virtual"),
    (samples.MEGATRON_CASE[:-200] + "\n  broken: [", "is not YAML", "complete"),
    (samples.TORCHTITAN.replace('mode = "full"', 'mode = "some"'), "'some'", "selective"),
    (samples.TORCHTITAN.replace("[training]", "[training"), "is not TOML", "correct that line"),
    (samples.TORCHTITAN.replace("[parallelism]", "[paralelism]"), "is no setting", "correct"),
    (samples.ACCELERATE_FSDP2.replace("size: 1\n", "size: 3\n", 1), "ranks cannot be cut", "lower a degree"),
    (samples.ACCELERATE_FSDP2.replace("bf16", "bf17"), "bf17", "bf16"),
    ("", "is empty", "give"),
    ("just words\n", "no kind of configuration", "give"),
    ('{"model_type": "llama"}', "config.json", "plan"),
]


@pytest.mark.parametrize(("text", "says", "fix"), BAD)
def test_bad_input_is_one_line_with_value_rule_and_fix(text, says, fix):
    with pytest.raises(BadInput) as error:
        read_text(text, "broken", "llama3-1b", num_ranks=8 if "fsdp_version" in text or "[mod" in text else None)
    assert says in error.value.message
    assert fix in error.value.fix
    assert "\n" not in str(error.value)
    assert error.value.message.startswith("broken")


def test_what_is_missing_is_said_with_the_option_that_gives_it():
    read = read_text(samples.DEEPSPEED_AUTO, "ds.json")
    assert read.plan is None
    with pytest.raises(BadInput) as error:
        read.require_plan()
    assert error.value.message == "ds.json: DeepSpeed JSON that does not say which model nor how many GPUs"
    assert "--model" in error.value.fix
    assert "--gpus" in error.value.fix


def test_a_variable_that_the_script_does_not_set_is_asked_for():
    read = read_text(samples.MEGATRON_SCRIPT.replace("TP=4; ", ""), "train.sh")
    assert read.plan is None
    with pytest.raises(BadInput, match=r"does not say what \$TP is; give a line TP=\.\.\. at the top"):
        read.require_plan()


def test_ranks_that_do_not_fit_the_degrees_are_asked_for():
    text = (
        samples.MEGATRON_SCRIPT.replace('NNODES:-"4"', 'NNODES:-"1"')
        .replace("PP=2", "PP=16")
        .replace("stage 4 \\", "stage 1 \\")
    )
    read = read_text(text, "train.sh")
    assert read.plan is None
    assert "number of ranks" in listed(read)
    assert read_text(text, "train.sh", num_ranks=64).require_plan().layout.pp == 16


@pytest.mark.parametrize("preset", ["llama3-8b", "llama2-7b", "qwen3-0.6b", "gpt2", "qwen3-30b-a3b"])
def test_model_arguments_describe_the_presets_network(preset):
    options = model_options(preset_config(preset))
    words = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in options.items())
    script = f"torchrun --nproc-per-node 8 pretrain_gpt.py {words} --micro-batch-size 1 --seq-length 1024\n"
    read = read_text(script, "f.sh")
    assert read.spec().num_parameters == load_spec(preset).num_parameters
    assert not read.config_notes


def test_patterns_of_experts():
    assert expert_pattern("([0]*3+[1]*2)", 5) == [0, 0, 0, 1, 1]
    assert expert_pattern("2", 4) == [1, 0, 1, 0]
    assert expert_pattern("([0]+[1])*2", 4) is None
    assert expert_pattern("[0,1]*2", 4) == [0, 1, 0, 1]


def test_layouts_of_pipelines():
    script = samples.MEGATRON_SCRIPT.replace(
        "--num-layers-per-virtual-pipeline-stage 4", "--pipeline-model-parallel-layout 'Et*3|(t*4|)*5,t*5|tttt,L'"
    )
    pipeline = read_text(script, "f.sh", num_ranks=32).require_plan().pipeline
    assert pipeline == Pipeline(schedule="interleaved", chunks=4, layers_per_stage=(3, 4, 4, 4, 4, 4, 5, 4))


def test_flat_names_every_entry():
    plan = read_text(samples.TORCHTITAN, "f", num_ranks=4).require_plan()
    assert {"layout.tp", "recipe.steps", "shard.reshard", "comm.env"} <= flat(plan).keys()


def damaged(text, draw):
    """The text cut short, with something put into it, or with a line changed or gone."""
    at = draw.randrange(len(text))
    if draw.random() < 0.3:
        return text[:at]
    if draw.random() < 0.5:
        odd = draw.choice(['"', "{", "}", "[", ":", "-", "0", "null", "true", '"auto"', "1e9", "-1", "\n", "$", "x"])
        return text[:at] + odd + text[at + draw.randrange(3) :]
    lines = text.split("\n")
    line = draw.randrange(len(lines))
    lines[line] = draw.choice(["", lines[line].replace("1", "0"), lines[line].replace("true", '"maybe"').replace("2", "[2]")])
    return "\n".join(lines)


@pytest.mark.parametrize("text", [text for texts in samples.ALL.values() for text in texts])
def test_damaged_files_are_read_or_refused_in_one_line(text):
    draw, refused = random.Random(7), 0
    for _ in range(80):
        try:
            read_text(damaged(text, draw), "f", "llama3-1b", num_ranks=8).spec()
        except BadInput as error:
            refused += 1
            assert "\n" not in str(error)
            assert error.fix
    assert 0 < refused < 80
