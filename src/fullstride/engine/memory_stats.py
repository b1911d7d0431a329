"""How much memory is in use: the allocator's figures on a GPU, the resident set on a CPU.

On a CPU `allocated` is how far the resident set has grown since `reset`, because torch counts nothing there.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from fullstride.events import Memory, now_ns

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class MemoryMeter:
    """Reads one rank's memory."""

    def __init__(self, device: torch.device) -> None:
        """Measure `device`, and this process's host memory."""
        self._device, self._process = device, psutil.Process()
        self._base = self._peak = 0
        self._cleared = False
        self.reset()

    def reset(self) -> None:
        """Forget peaks; on a CPU also take the present resident set as the base. Called before a build."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR.write_text("5")  # resets VmHWM, proc(5)
            self._cleared = True
        except OSError:
            self._cleared = False  # then the peak is the largest that was read
        self._base = self._peak = self._resident()

    def read(self, step: int) -> Memory:
        """Memory at this moment; costs about 0.1 ms on a GPU and does not synchronise."""
        host = self._resident()
        if self._device.type != "cuda":
            self._peak = max(self._peak, host, _high_water() if self._cleared else 0)
            return self._event(step, (host - self._base, host, self._peak - self._base, self._peak), host, host)
        stats = torch.cuda.memory_stats(self._device)
        keys = ("allocated_bytes", "reserved_bytes")
        now, peak = ([int(stats.get(f"{key}.all.{which}", 0)) for key in keys] for which in ("current", "peak"))
        free, total = torch.cuda.mem_get_info(self._device)
        return self._event(step, (now[0], now[1], peak[0], peak[1]), total - free, host)

    def _event(self, step: int, figures: tuple[int, int, int, int], device_used: int, host: int) -> Memory:
        allocated, reserved, peak_allocated, peak_reserved = (max(0, figure) for figure in figures)
        return Memory(
            time_ns=now_ns(),
            step=step,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            peak_allocated_bytes=peak_allocated,
            peak_reserved_bytes=peak_reserved,
            device_used_bytes=device_used,
            host_bytes=host,
        )

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)


def _high_water() -> int:
    """Peak resident set in bytes since the last reset, 0 where the system does not say."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
