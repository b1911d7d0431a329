"""Messages between the ranks of a pipeline.

Each direction of each pair of ranks has a group of its own, so that on GPUs it has a communicator and a stream of its own:
activations going down never wait for gradients coming up. Within a direction there is one order, which the schedule has on
both sides. Receives are posted ahead, `AHEAD` of them; sends never block, and their tensors are kept until they are done.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from fullstride.engine.mesh import Mesh
from fullstride.errors import TimedOut
from fullstride.plan.schedule.action import Action
from fullstride.plan.schedule.placement import Placement

AHEAD = 2
"""Receives that are posted before they are needed, from each rank: the ring of buffers that waits for messages."""
CTAS = 2
"""Blocks of threads that a message on a GPU uses."""
_groups: dict[tuple[int, tuple[int, int]], dist.ProcessGroup] = {}
"""Groups by world and (from, to): a worker that builds plan after plan makes each once."""


@dataclasses.dataclass
class _Posted:
    """A message under way."""

    action: Action
    tensor: torch.Tensor
    work: Any


class Exchange:
    """This rank's end of all its messages."""

    def __init__(
        self, mesh: Mesh, placement: Placement, actions: tuple[Action, ...], row: tuple[int, ...], dtype: torch.dtype,
        timeout_seconds: float,
    ) -> None:  # fmt: skip
        """Make the groups; collective.

        Args:
            mesh: of all ranks.
            placement: where the stages stand.
            actions: of all ranks, messages among them.
            row: shape of one sample's hidden state.
            dtype: of hidden states and their gradients.
            timeout_seconds: longest wait for a message.
        """
        self._mesh, self._placement = mesh, placement
        self._row, self._dtype, self._timeout = row, dtype, timeout_seconds
        self._members = mesh.ranks("pp")
        self._rank = mesh.coordinate("pp")
        pairs = sorted({(a.rank, a.peer) for a in actions if a.kind.startswith("send")})
        self._connect(pairs)
        self._ahead: dict[int, deque[Action]] = {}
        self._posted: dict[int, deque[_Posted]] = {}
        self._sent: dict[int, deque[_Posted]] = {}

    def _connect(self, pairs: list[tuple[int, int]]) -> None:
        """A group for each direction. The first message of each is sent here, in one order on all ranks: making a
        communicator waits for the other side, and ranks that made theirs in different orders would wait for each other.
        """
        device = self._mesh.device
        for source, target in pairs:
            for members in self._mesh.sets("pp"):
                key = (id(dist.group.WORLD), (members[source], members[target]))
                if key in _groups:
                    continue
                wait = datetime.timedelta(seconds=self._timeout)
                _groups[key] = group = _new_group(list(key[1]), wait, device)
                if self._mesh.rank in key[1]:
                    sign = torch.zeros(1, device=device)
                    way = dist.isend if self._mesh.rank == key[1][0] else dist.irecv
                    other = key[1][1] if self._mesh.rank == key[1][0] else key[1][0]
                    _start(way, sign, other, group).wait()

    def begin(self, actions: list[Action]) -> None:
        """Begin a step: post the first receives.

        Args:
            actions: of this rank, in order.
        """
        self._ahead = {}
        for action in actions:
            if action.kind.startswith("recv"):
                self._ahead.setdefault(action.peer, deque()).append(action)
        self._posted = {peer: deque() for peer in self._ahead}
        for peer in self._ahead:
            self._post(peer)

    def _post(self, peer: int) -> None:
        while self._ahead[peer] and len(self._posted[peer]) < AHEAD:
            action = self._ahead[peer].popleft()
            buffer = torch.empty((action.hi - action.lo, *self._row), dtype=self._dtype, device=self._mesh.device)
            source = self._members[peer]
            work = _start(dist.irecv, buffer, source, self._group(peer, self._rank))
            self._posted[peer].append(_Posted(action, buffer, work))

    def receive(self, action: Action) -> torch.Tensor:
        """The message of a receive; on a GPU the stream waits for it, not the host.

        Raises:
            TimedOut: it did not come (on a GPU the communication library's own watchdog ends the process).
        """
        posted = self._posted[action.peer].popleft()
        assert posted.action == action, "receives come in the order of the schedule"
        self._wait(posted)
        self._post(action.peer)
        return posted.tensor

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start a send.

        Args:
            action: the send.
            tensor: [samples, *row]; it may be let go of at once.
        """
        sent = self._sent.setdefault(action.peer, deque())
        while sent and sent[0].work.is_completed():
            sent.popleft()
        message = tensor.detach().to(self._dtype).contiguous()
        assert message.shape == (action.hi - action.lo, *self._row), f"{tuple(message.shape)} for {action.text()}"
        work = _start(dist.isend, message, self._members[action.peer], self._group(self._rank, action.peer))
        sent.append(_Posted(action, message, work))

    def finish(self) -> None:
        """End a step: all that was sent has left."""
        for sent in self._sent.values():
            while sent:
                self._wait(sent.popleft())

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return _groups[id(dist.group.WORLD), (self._members[source], self._members[target])]

    def _wait(self, posted: _Posted) -> None:
        began = time.monotonic()
        try:
            posted.work.wait()
        except RuntimeError as error:
            waited = time.monotonic() - began
            if "imed out" not in str(error) and waited < self._timeout:
                raise
            raise TimedOut(self._words(posted.action, waited), fix="look at that rank's log") from error

    def _words(self, action: Action, waited: float) -> str:
        stage = self._placement.stage(action.rank, action.chunk)
        down = action.kind in ("send_forward", "recv_backward")
        other = stage + 1 if down else stage - 1
        what = "activations" if action.kind.endswith("forward") else "gradients"
        way = "to go to" if action.kind.startswith("send") else "from"
        return (
            f"stage {stage} (rank {self._mesh.rank}) waited {waited:.0f} s for {what} of samples "
            f"[{action.lo}, {action.hi}) {way} stage {other} (rank {self._members[action.peer]})"
        )


def _new_group(ranks: list[int], wait: datetime.timedelta, device: torch.device) -> dist.ProcessGroup:
    """On a GPU messages go before computation, and take few of its multiprocessors: a receive that waits holds on to them."""
    if device.type != "cuda":
        made: Any = dist.new_group(ranks, timeout=wait)
        return made  # type: ignore[no-any-return]
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options(is_high_priority_stream=True)
    options.config.max_ctas = CTAS
    options._timeout = wait  # no public way; torch warns where it differs from the argument
    group: Any = dist.new_group(ranks, timeout=wait, backend="nccl", pg_options=options)
    return group  # type: ignore[no-any-return]


def _start(way: Any, tensor: torch.Tensor, other: int, group: dist.ProcessGroup) -> Any:
    """One message. As a batch of one: NCCL then uses the group's communicator, and makes none for the pair on the side."""
    return dist.batch_isend_irecv([dist.P2POp(way, tensor, other, group)])[0]
