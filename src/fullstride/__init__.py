"""Plan, run, measure, explain and tune distributed training of large language models, with your model unchanged.

    import fullstride as fs

    plan = fs.make_plan("llama3-1b")  # no torch needed
    run = fs.prepare(model, plan)  # inside a process that torchrun started, or alone
    out = run.step(batch)

Names are looked up when they are first used, so that `import fullstride` costs milliseconds and planning never
imports torch. `prepare` is the one way from here into the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullstride.cli.api import make_plan
    from fullstride.cli.record import read_run
    from fullstride.cli.tuning import autotune
    from fullstride.engine.run import prepare

__version__ = "0.1.0"
__all__ = ["__version__", "autotune", "make_plan", "prepare", "read_run"]

_HOMES = {
    "autotune": "fullstride.cli.tuning",
    "make_plan": "fullstride.cli.api",
    "prepare": "fullstride.engine.run",
    "read_run": "fullstride.cli.record",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fullstride' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
