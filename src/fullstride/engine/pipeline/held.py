"""Hidden states, or their gradients, by ranges of samples: what comes in one size and is used in another."""

from __future__ import annotations

import torch


class Held:
    """Tensors of one stage that wait to be used, each row once."""

    def __init__(self) -> None:
        """Begin empty."""
        self._parts: dict[int, tuple[int, torch.Tensor]] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._parts)

    def put(self, lo: int, hi: int, tensor: torch.Tensor) -> None:
        """Keep samples [lo, hi)."""
        assert tensor.shape[0] == hi - lo, "one row a sample"
        self._parts[lo] = (hi, tensor)

    def take(self, lo: int, hi: int) -> torch.Tensor:
        """Samples [lo, hi), joined from several tensors or cut from one, which keeps the rest."""
        found = []
        at = lo
        while at < hi:
            begin = next((b for b, (end, _) in self._parts.items() if b <= at < end), None)
            assert begin is not None, f"sample {at} has not come, though the schedule was checked"
            end, tensor = self._parts.pop(begin)
            upto = min(end, hi)
            found.append(tensor[at - begin : upto - begin])
            if begin < at:
                self._parts[begin] = (at, tensor[: at - begin])
            if upto < end:
                self._parts[upto] = (end, tensor[upto - begin :])
            at = upto
        return found[0] if len(found) == 1 else torch.cat(found)
