"""A CPU assist: the best experts travel, the host computes the others."""

import dataclasses

import moe_edge as me


@dataclasses.dataclass(frozen=True)
class FirstTravels(me.Assist):
    """As many absent experts travel as they may, those of the best scores.

    Attributes:
      travel: experts of a layer and step that are transferred.
    """

    travel: int = 1

    name = "my_first_travels"
    SOURCE = "an example"

    def __post_init__(self):
        if self.travel < 0:
            raise me.ConfigError(f"travel must be 0 or more, got {self.travel}")

    def take(self, absent, ids_TK, costs):
        return absent[self.travel :]
