"""The command is exactly what is written down, and nothing is inherited by accident."""

import shlex
import sys

from tests.launch.helpers import plan_of

from fullstride.launch.command import shown, worker_command, worker_env
from fullstride.plan.plan import Comm, MadeFor, Threads
from fullstride.rundir import RunDir


def test_the_command_of_a_worker(monkeypatch):
    job = worker_command(RunDir(root="runs/a b"), plan_of(4))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    words += ["--log-dir", "runs/a b/logs", "--redirects", "3", "-m", "fullstride.engine.worker", "runs/a b"]
    assert list(job.command) == words and job.num_processes == 4 and job.run_dir == "runs/a b"
    assert shlex.split(shown(job))[-len(words) :] == words


def test_training_has_its_own_words():
    job = worker_command("run", plan_of(1), train=True, save_every=5, export="out")
    assert job.command[-6:] == ("run", "--train", "--save-every", "5", "--export", "out")
    assert "--nproc-per-node" in job.command and job.num_processes == 1


def test_the_environment_follows_the_plan(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    plain = worker_env(plan_of())
    assert "OMP_NUM_THREADS" not in plain and plain["TOKENIZERS_PARALLELISM"] == "false"
    assert plain["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    tuned = worker_env(
        plan_of(threads=Threads(compute=3), comm=Comm(env={"NCCL_DEBUG": "WARN"}), made_for=MadeFor(device="cpu"))
    )
    assert (tuned["OMP_NUM_THREADS"], tuned["NCCL_DEBUG"]) == ("3", "WARN") and "PYTORCH_ALLOC_CONF" not in tuned


def test_the_user_s_allocator_settings_stay(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_ALLOC_CONF" not in worker_env(plan_of())
