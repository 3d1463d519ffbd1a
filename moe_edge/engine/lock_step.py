"""Row slots of several processes in lock step: process 0 decides, all do the same.

Process 0 alone meets clients, clocks and policies. Each call of its row slots that
gives the devices work is told to the others together with what was decided since the
call before it (who joins with which tokens and K, who leaves), and they make the same
calls in the same order. What a grammar allows is told too, row by row. All else that a
step depends on, above all the tokens drawn, every process reads from its own devices,
which hold the same.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_edge.core.checks import MoeEdgeError
from moe_edge.engine.base import Engine
from moe_edge.engine.slot_rows import SlotRow
from moe_edge.engine.slots import RowSlots
from moe_edge.hosts.frames import read_json
from moe_edge.hosts.link import Link, end_process
from moe_edge.model.new_token import Guide, NewToken
from moe_edge.model.sampling import Sampling

END = "end"  # of all calls


class GuideFailedError(MoeEdgeError):
    """A row's guide failed in process 0; the step is lost in all processes."""


class LeadingSlots(RowSlots):
    """Those of process 0, which tell the others each call.

    Args:
      engine: on the devices of all processes.
      link: to the others, which run `follow`.
      **sizes: of `RowSlots`.
    """

    def __init__(self, engine: Engine, link: Link, **sizes):
        super().__init__(engine, **sizes)
        self._link, self._calls = link, []

    def warm_up(self, engine=None):
        return self._lead("warm_up", super().warm_up)

    def admit(self, rows: Sequence[SlotRow]) -> None:
        told = [row_to_json(row) for row in rows]
        if told:
            super().admit([self._with_told_guide(row) for row in rows])
            self._calls.append(["admit", told])

    def set_k(self, id, k: int) -> None:
        if self[id].k != k:
            super().set_k(id, k)
            self._calls.append(["set_k", id, k])

    def release(self, id) -> None:
        super().release(id)
        self._calls.append(["release", id])

    def clear(self) -> None:
        self._lead("clear", super().clear)

    def keep(self, k: int, tokens, layers) -> bool:
        """Nothing: the others have no such caches."""
        return False

    def decode(self) -> list[NewToken]:
        return self._lead("decode", super().decode, self.on_routing is not None)

    def prefill(self) -> list[NewToken]:
        if not self.has_prompts:
            return []
        return self._lead("prefill", super().prefill, self.on_routing is not None)

    def end(self) -> None:
        """No call follows."""
        self._tell(END)

    def _tell(self, *call: Any) -> None:
        calls, self._calls = [*self._calls, call], []
        self._link.broadcast(json.dumps(calls).encode())

    def _lead(self, name: str, compute: Callable, *given: Any):
        self._tell(name, *given)
        return _in_step(self._link, compute)

    def _with_told_guide(self, row: SlotRow) -> SlotRow:
        if row.guide is None:
            return row
        return dataclasses.replace(row, guide=_ToldGuide(row.guide, self._link))


class _ToldGuide:
    """A guide of process 0, whose answers the others hear."""

    def __init__(self, guide: Guide, link: Link):
        self._guide, self._link = guide, link

    def fill(self, bits_W: np.ndarray) -> None:
        try:
            self._guide.fill(bits_W)
        except Exception as error:  # of any kind: it fails the step, not the run
            self._link.broadcast(b"")
            raise GuideFailedError("a row's guide failed") from error
        self._link.broadcast(bits_W.tobytes())

    def accept(self, token: int) -> None:
        try:
            self._guide.accept(token)
        except Exception as error:
            self._guide = _Failed(error)  # its next `fill` says so


class _Failed:
    def __init__(self, error: Exception):
        self._error = error

    def fill(self, bits_W: np.ndarray) -> None:
        raise self._error


class _HeardGuide:
    """What stands for a guide in the other processes."""

    def __init__(self, link: Link):
        self._link = link

    def fill(self, bits_W: np.ndarray) -> None:
        heard = self._link.receive()
        if not heard:
            raise GuideFailedError("a row's guide failed in process 0")
        bits_W[:] = np.frombuffer(heard, np.uint32)

    def accept(self, token: int) -> None:
        """Process 0 knows."""


def follow(slots: RowSlots, link: Link) -> None:
    """Makes the calls of process 0's `LeadingSlots` until it ends them.

    Args:
      slots: of the same sizes, over the same engine.
    """

    def admit(rows: list[dict]) -> None:
        slots.admit([row_from_json(row, link) for row in rows])

    def watched(compute: Callable[[], Any]) -> Callable[[bool], None]:
        def run(is_watched: bool) -> None:
            slots.on_routing = (lambda layer, routing: None) if is_watched else None
            try:
                compute()
            except GuideFailedError:
                pass  # process 0 clears all rows next

        return run

    calls: dict[str, Callable[..., Any]] = {
        "warm_up": slots.warm_up,
        "admit": admit,
        "set_k": slots.set_k,
        "release": slots.release,
        "clear": slots.clear,
        "decode": watched(slots.decode),
        "prefill": watched(slots.prefill),
    }
    while True:
        for name, *given in read_json(link.receive()):
            if name == END:
                return
            _in_step(link, calls[name], *given)


def _in_step(link: Link, compute: Callable, *given: Any):
    """A call that all processes make; where it fails in one the run is over.

    The others may wait in a collective, whose next one would then meet another.
    """
    try:
        return compute(*given)
    except GuideFailedError:
        raise
    except Exception as error:
        link.wait_lost()  # who is lost knows better why
        first = str(error).strip().partition("\n")[0]
        line = f"a step failed: {type(error).__name__}: {first[:200]}"
        link.close(line)
        end_process(f"{line}; start all processes again")


def row_to_json(row: SlotRow) -> dict[str, Any]:
    """A row as it is told to other processes."""
    told = {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(row)
        if field.init and field.name not in ("sampling", "guide")
    }
    told["sampling"] = dataclasses.asdict(row.sampling)
    return told | {"guided": row.guide is not None}


def row_from_json(told: dict[str, Any], link: Link) -> SlotRow:
    """The row that process 0 has told."""
    given = dict(told)
    given["sampling"] = Sampling(**given["sampling"])
    given["guide"] = _HeardGuide(link) if given.pop("guided") else None
    given |= {name: tuple(given[name]) for name in ("prompt", "forced")}
    return SlotRow(**given)
