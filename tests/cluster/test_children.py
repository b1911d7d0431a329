"""Children under a deadline: nothing of them remains."""

import sys
import time

import psutil

from fullstride.cluster.children import run_bounded

SLEEPER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
"""


def test_a_child_that_ends():
    code, output = run_bounded([sys.executable, "-c", "print('x'*20000); raise SystemExit(3)"], timeout_seconds=30)
    assert code == 3 and set(output.strip()) == {"x"} and len(output) <= 8000


def test_a_child_that_does_not_end_is_ended_with_its_children_in_other_sessions():
    start = time.monotonic()
    code, output = run_bounded([sys.executable, "-c", SLEEPER + "time.sleep(60)"], timeout_seconds=1.5)
    assert code is None and time.monotonic() - start < 20
    assert not psutil.pid_exists(int(output))


def test_what_a_dead_child_leaves_behind_is_ended_too():
    code, output = run_bounded([sys.executable, "-c", SLEEPER + "time.sleep(0.8)"], timeout_seconds=30)
    assert code == 0
    assert not psutil.pid_exists(int(output))
