"""What is written is accepted by the framework's own parser; skipped where the framework is not installed.

FULLSTRIDE_DOORS_PYTHON names an interpreter that has torchtitan, deepspeed and accelerate; else this one is asked.
"""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace
from tests.plan.formats import samples
from tests.plan.formats.test_round_trip import any_plan

from fullstride.plan.formats import accelerate, deepspeed, torchtitan
from fullstride.plan.formats.detect import read_text, write_as
from fullstride.plan.plan import Batch, Layout, Shard

PYTHON = os.environ.get("FULLSTRIDE_DOORS_PYTHON", sys.executable)

PROGRAMS = {
    "torchtitan": """
import json, sys
from torchtitan.config import ConfigManager
out = []
for path in sys.argv[1:]:
    c = ConfigManager().parse_args(["--job.config_file", path])
    p, t = c.parallelism, c.training
    out.append([p.data_parallel_replicate_degree, p.data_parallel_shard_degree, p.tensor_parallel_degree,
                p.pipeline_parallel_degree, p.context_parallel_degree, t.global_batch_size, t.seq_len])
print(json.dumps(out))
""",
    "deepspeed": """
import json, sys, os
import deepspeed.runtime.config as config
out = []
for path in sys.argv[1:]:
    with open(path) as file:
        raw = json.load(file)
    mp = raw.get("tensor_parallel", {}).get("autotp_size", 1)
    data = raw["train_batch_size"] // raw["train_micro_batch_size_per_gpu"] // raw["gradient_accumulation_steps"]
    class Ranks:
        def get_data_parallel_world_size(self): return data
        def get_sequence_parallel_world_size(self): return raw.get("sequence_parallel_size", 1)
    real = config.dist.get_rank
    config.dist.get_rank = lambda group=None: 0
    c = config.DeepSpeedConfig(path, mpu=Ranks())
    config.dist.get_rank = real
    out.append([c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps,
                c.zero_config.stage, bool(c.bfloat16_config.enabled), float(c.gradient_clipping)])
print(json.dumps(out))
""",
    "accelerate": """
import json, sys
from accelerate.commands.config.config_args import load_config_from_file
out = []
for path in sys.argv[1:]:
    c = load_config_from_file(path)
    out.append([c.num_processes, str(c.distributed_type.value), c.mixed_precision])
print(json.dumps(out))
""",
}
ENDS = {"torchtitan": "toml", "deepspeed": "json", "accelerate": "yaml"}


def asked(kind, program, *arguments):
    probe = subprocess.run([PYTHON, "-c", f"import {kind}"], capture_output=True, text=True, timeout=120, check=False)
    if probe.returncode:
        # Where an interpreter was named for this, a framework that does not import is a fault and no reason to skip.
        assert "FULLSTRIDE_DOORS_PYTHON" not in os.environ, probe.stderr[-3000:]
        pytest.skip(f"{PYTHON} has no {kind} (FULLSTRIDE_DOORS_PYTHON names an interpreter that has)")
    done = subprocess.run(
        [PYTHON, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def plans():
    """A few of every part, drawn with a fixed seed, and the samples."""
    drawn = []

    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(plan=any_plan())
    def collect(plan):
        drawn.append(plan)

    collect()
    for text in (text for texts in samples.ALL.values() for text in texts):
        read = read_text(text, "f", "llama3-1b")
        drawn.append((read if read.plan else read_text(text, "f", "llama3-1b", num_ranks=32)).require_plan())
    drawn.append(replace(drawn[0], layout=Layout(dp_replicate=4), shard=Shard(carrier="ddp"), batch=Batch()))
    return [replace(plan, workload=replace(plan.workload, samples_per_step=step_of(plan))) for plan in drawn]


def step_of(plan):
    return plan.batch.micro_batch * plan.batch.accumulation * plan.layout.data_parallel


EXPECTED = {
    "torchtitan": lambda plan: [
        plan.layout.dp_replicate,
        plan.layout.dp_shard,
        plan.layout.tp,
        plan.layout.pp,
        plan.layout.cp,
        plan.workload.samples_per_step,
        plan.workload.sequence_length,
    ],
    "deepspeed": lambda plan: [
        plan.workload.samples_per_step,
        plan.batch.micro_batch,
        plan.batch.accumulation,
        plan.shard.stage,
        plan.precision.block == "bf16" and plan.precision.cast != "autocast",
        plan.recipe.clip_norm,
    ],
}


SETTINGS = {
    "torchtitan": """
import dataclasses, json, typing
from torchtitan.config.job_config import JobConfig
def walk(cls, prefix=""):
    for f in dataclasses.fields(cls):
        kind = typing.get_type_hints(cls)[f.name]
        if dataclasses.is_dataclass(kind): yield from walk(kind, f"{prefix}{f.name}.")
        else: yield prefix + f.name
print(json.dumps(list(walk(JobConfig))))
""",
    "deepspeed": """
import json
import deepspeed.runtime.zero.config as zero
import deepspeed.runtime.zero.offload_config as offload
import deepspeed.runtime.precision_config as precision
out = ["zero_optimization." + (f.alias or n) for n, f in zero.DeepSpeedZeroConfig.model_fields.items()]
out += ["zero_optimization.offload_param." + n for n in offload.DeepSpeedZeroOffloadParamConfig.model_fields]
out += ["zero_optimization.offload_optimizer." + n for n in offload.DeepSpeedZeroOffloadOptimizerConfig.model_fields]
out += ["fp16." + n for n in precision.DeepSpeedFP16Config.model_fields]
out += ["bf16." + n for n in precision.DeepSpeedBF16Config.model_fields]
print(json.dumps(out))
""",
    "accelerate": """
import dataclasses, json
from accelerate.commands.config.config_args import ClusterConfig
print(json.dumps([f.name for f in dataclasses.fields(ClusterConfig)]))
""",
}
TABLES = {"torchtitan": torchtitan.TABLE, "deepspeed": deepspeed.TABLE, "accelerate": accelerate.TABLE}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_the_table_has_every_setting_of_the_framework(kind):
    found = asked(kind, SETTINGS[kind])
    table = TABLES[kind]
    heads = {key[:at] for key in table for at, char in enumerate(key) if char == "."}  # tables of which rows name the entries
    unknown = [name for name in found if not any(name[:at] in table for at in (*ends(name), len(name))) and name not in heads]
    assert not unknown


def ends(name):
    return [at for at, char in enumerate(name) if char == "."]


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_frameworks_own_parser_takes_it(kind, tmp_path):
    chosen, paths = plans(), []
    for index, plan in enumerate(chosen):
        path = tmp_path / f"{index}.{ENDS[kind]}"
        path.write_text(write_as(plan, kind).text)
        paths.append(path)
    found = asked(kind, PROGRAMS[kind], *paths)
    if kind in EXPECTED:
        assert found == [EXPECTED[kind](plan) for plan in chosen]
    else:
        assert [one[0] for one in found] == [plan.layout.world_size // plan.layout.pp for plan in chosen]
