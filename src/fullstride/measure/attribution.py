"""Where the time of a step goes: unions of intervals, each nanosecond counted once.

Kinds are taken in this order, each keeping only what those before it left: compute (forward, backward, optimizer), exposed
communication, offload, data, host gap, rest. Where there is a device clock, compute is what the device computes, and a
host gap is a stretch in which the device stands still while the host is inside a phase, busy launching. On a CPU, compute
is the host's phases; communication inside of them cannot be told from compute and is not counted as exposed.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullstride.events import Phase, Span, StepEnd
from fullstride.measure.measurement import Share, ShareName
from fullstride.measure.stats import Stretch, clipped, length, without

AGREEMENT = 0.01
"""Shares must sum to the step within this, or the difference is called unattributed."""
MOST_SQUEEZED = 0.1
"""Compute of a profiled step that must shrink by more than this to fit into a timed step does not describe it."""
MOST_SQUEEZED_ON_HOST = 0.5
"""The same where the host computes: the profiler slows all that it does, and waits for other ranks with it."""

_COMPUTE: tuple[tuple[ShareName, tuple[Phase, ...]], ...] = (
    ("forward", ("forward",)),
    ("backward", ("backward", "weight_grad")),
    ("optimizer", ("optimizer",)),
)
_ORDER: tuple[ShareName, ...] = ("data", "forward", "backward", "exposed_comm", "optimizer", "offload", "host_gap", "rest")


def attribute(spans: Sequence[Span], steps: Sequence[StepEnd]) -> tuple[Share, ...]:
    """Shares of the mean step of one rank.

    Args:
        spans: of that rank, both clocks on the same axis.
        steps: the profiled steps; each is the window from `start_ns` to `time_ns`.

    Returns:
        Shares in seconds that sum to the mean step; one share `unattributed` if no span says what was computed.
    """
    windows = [(step.start_ns, step.time_ns) for step in steps if step.time_ns > step.start_ns]
    if not windows:
        return ()
    totals: dict[ShareName, int] = {}
    for window in windows:
        for name, nanoseconds in _one_step(spans, window).items():
            totals[name] = totals.get(name, 0) + nanoseconds
    computed = sum(totals.get(name, 0) for name, _ in _COMPUTE)
    if not computed:
        return (Share(name="unattributed", seconds=length(windows) / len(windows) / 1e9),)
    return tuple(Share(name=name, seconds=totals[name] / len(windows) / 1e9) for name in _ORDER if totals.get(name))


def _one_step(spans: Sequence[Span], window: Stretch) -> dict[ShareName, int]:
    inside = [s for s in spans if s.start_ns < window[1] and s.end_ns > window[0]]
    on_device = any(s.clock == "device" for s in inside)
    taken: list[Stretch] = []
    found: dict[ShareName, int] = {}

    def take(name: ShareName, chosen: list[Span]) -> None:
        new = without(clipped(((s.start_ns, s.end_ns) for s in chosen), window), taken)
        found[name] = length(new)
        taken[:] = clipped([*taken, *new], window)

    for name, phases in _COMPUTE:
        take(name, [s for s in inside if s.phase in phases and _computes(s, on_device)])
    take("exposed_comm", [s for s in inside if _communicates(s, on_device)])
    take("offload", [s for s in inside if s.phase == "offload"])
    take("data", [s for s in inside if s.phase in ("data", "h2d")])
    if on_device:
        take("host_gap", [s for s in inside if s.clock == "host" and s.phase in ("forward", "backward", "optimizer")])
    found["rest"] = length(without([window], taken))
    return found


def _computes(span: Span, on_device: bool) -> bool:
    if on_device:
        return span.clock == "device" and span.kernel != "collective"
    return True


def _communicates(span: Span, on_device: bool) -> bool:
    if on_device and span.clock == "host":
        return False
    return span.phase == "comm" or span.kernel == "collective"


def fit_to_step(shares: Sequence[Share], step_seconds: float, *, on_host: bool = False) -> tuple[Share, ...]:
    """Bring the shares of a profiled step to the length of the timed steps.

    A profiler slows the host, not the device: what the profiled step is too long is taken from the host gap, then from
    the rest, and only then, up to 10 %, from all shares alike. What it is too short is `unattributed`, unless it is under
    1 %, which goes to the rest. On a CPU (`on_host`) all shares are the host's, and taken from alike, up to a half.
    """
    seconds = {share.name: share.seconds for share in shares}
    if not seconds or "unattributed" in seconds:
        return (Share(name="unattributed", seconds=step_seconds),) if shares else ()
    excess = sum(seconds.values()) - step_seconds
    for name in () if on_host else ("host_gap", "rest"):
        cut = min(max(excess, 0.0), seconds.get(name, 0.0))
        seconds[name] = seconds.get(name, 0.0) - cut
        excess -= cut
    if excess > (MOST_SQUEEZED_ON_HOST if on_host else MOST_SQUEEZED) * step_seconds:
        return (Share(name="unattributed", seconds=step_seconds),)
    if excess > 0:
        factor = step_seconds / (step_seconds + excess)
        seconds = {name: value * factor for name, value in seconds.items()}
    elif -excess <= AGREEMENT * step_seconds:
        seconds["rest"] -= excess
    else:
        seconds["unattributed"] = -excess
    return tuple(Share(name=name, seconds=seconds[name]) for name in (*_ORDER, "unattributed") if seconds.get(name, 0.0) > 0)
