"""What a load gave: requests, how late they were sent, and what was decided."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_edge.loadtest.decisions_file import LoopMade, replay_decisions
from moe_edge.schedule.figures import summarise
from moe_edge.schedule.request import Request

HEAD = "id,arrival_s,floor,outcome,tokens,admitted_s,first_s,last_s,mean_k"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """Of a run.

    Attributes:
      served: of each request; late_s: that each was sent after its time; None where
        nothing was sent.
      made: the loop that decided, and lines: what it did; None where it is elsewhere.
      is_equal: whether the same decisions were made again; None: nobody tried.
      notes: for people.
    """

    served: Sequence[Request]
    late_s: Sequence[float] | None = None
    made: LoopMade | None = None
    lines: Sequence[str] = ()
    is_equal: bool | None = None
    notes: Sequence[str] = ()

    @classmethod
    def decided(cls, made: LoopMade, lines: Sequence[str], **more) -> "Results":
        """Of a run whose decisions are known: they are made again."""
        _, differs = replay_decisions(made, lines)
        notes = [*more.pop("notes", ()), *([differs] if differs else [])]
        return cls(made=made, lines=lines, is_equal=not differs, notes=notes, **more)

    def summary(self, slo_ttft_s: float, slo_tpot_s: float) -> dict[str, Any]:
        """The last line of `moe-edge load`."""
        figures = summarise(self.served, slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s)
        late_s = None if self.late_s is None else np.percentile(self.late_s or [0], 99)
        return figures | {
            "late_ms_p99": None if late_s is None else 1e3 * float(late_s),
            "decisions_equal": self.is_equal,
        }

    def csv(self) -> str:
        """A line a request; nothing where there is no value."""
        lines = [HEAD]
        for number, one in enumerate(self.served):
            mean_k = one.k_sum / one.made if one.made and one.k_sum else None
            cells = (
                *(number, one.arrival_s, one.floor or None, one.state, one.made),
                *(one.admitted_s, one.first_s, one.last_s, mean_k),
            )
            lines.append(",".join("" if cell is None else str(cell) for cell in cells))
        return "\n".join(lines) + "\n"
