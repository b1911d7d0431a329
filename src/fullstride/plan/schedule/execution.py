"""The lists carried out without a clock: do they come to their end, and with how many buffers."""

from __future__ import annotations

from collections import deque

from fullstride.plan.schedule.action import Action


def stuck(ranks: list[list[Action]], buffers: int | None) -> tuple[Action, ...]:
    """The two actions at which ranks wait for each other; empty if all lists come to their end.

    A receive waits for its message; a send waits while `buffers` messages to the same rank have not been received. Where
    the rank that is waited for has nothing left to do, its last action stands for it.

    Args:
        ranks: actions of each rank, in order.
        buffers: messages that may be on their way from one rank to another; None for any number.
    """
    at = _carry_out(ranks, buffers)[0]
    waiting = [rank for rank, own in enumerate(ranks) if at[rank] < len(own)]
    if not waiting:
        return ()
    rank, seen = waiting[0], set[int]()
    while rank not in seen and at[rank] < len(ranks[rank]):
        seen.add(rank)
        before, rank = rank, ranks[rank][at[rank]].peer
    pair = ranks[before][at[before]]
    own = ranks[rank]
    return (pair, own[min(at[rank], len(own) - 1)]) if own else (pair,)


def least_buffers(ranks: list[list[Action]]) -> int:
    """The least number of buffers, between each two ranks, with which the lists come to their end.

    Raises:
        AssertionError: they do not end with any number.
    """
    high = max(1, sum(action.kind in ("send_forward", "send_backward") for own in ranks for action in own))
    assert not stuck(ranks, high), "check the lists first"
    low = 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if stuck(ranks, middle) else (low, middle)
    return low


def _carry_out(ranks: list[list[Action]], buffers: int | None) -> tuple[list[int], dict[tuple[int, int], int]]:
    """How far each rank comes, and the messages left on their way."""
    at = [0] * len(ranks)
    moving: dict[tuple[int, int], int] = {}
    todo = deque(range(len(ranks)))
    while todo:
        rank = todo.popleft()
        own, place, woken = ranks[rank], at[rank], set[int]()
        while place < len(own):
            action = own[place]
            if action.kind in ("recv_forward", "recv_backward"):
                pair = (action.peer, rank)
                if not moving.get(pair):
                    break
                moving[pair] -= 1
                woken.add(action.peer)
            elif action.kind in ("send_forward", "send_backward"):
                pair = (rank, action.peer)
                if buffers is not None and moving.get(pair, 0) >= buffers:
                    break
                moving[pair] = moving.get(pair, 0) + 1
                woken.add(action.peer)
            place += 1
        at[rank] = place
        todo.extend(woken)
    return at, moving
