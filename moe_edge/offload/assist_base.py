"""The interface of CPU assists: which absent experts the host computes itself."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from moe_edge.core.plug_in import PlugIn, Registry


class AssistCosts(NamedTuple):
    """Seconds of one expert, means of the last measurements.

    Attributes:
      load_s: to bring it to the device.
      host_s: to compute it on the host.
      device_s: to compute it on the device; 0 where that is not known, on a GPU.
    """

    load_s: float
    host_s: float
    device_s: float


class Assist(PlugIn):
    """Splits the absent experts of a layer between the link and the host's cores.

    Subclasses are frozen dataclasses. Mode layered calls `take` once for each layer and
    decode step in which experts are absent, after the lookup and before any of them is
    transferred; a server does the same. Mode fused reads no routing on the host: with
    `assist_in_fused` it asks one that `takes_last` once for each number of absent
    experts, and refuses others. Replay and the simulators compute nothing, and have
    none.

    Attributes:
      takes_last: what it takes are always the last ones of `absent`, as many as costs
        and their number say.

    >>> class Rest(me.Assist):
    ...     '''The best of the absent experts travels, the host computes the others.'''
    ...     def take(self, absent, ids_TK, costs):
    ...         return absent[1:]
    >>> with model.offload("25%", mode="layered", assist=Rest) as engine:
    ...     len(engine.generate("Once upon a time", max_new_tokens=4).tokens)
    4
    """

    required: ClassVar[tuple[str, ...]] = ("take",)
    takes_last: ClassVar[bool] = False

    def take(
        self, absent: Sequence[int], ids_TK: np.ndarray, costs: AssistCosts
    ) -> Sequence[int]:
        """Which absent experts the host computes; the others travel.

        Args:
          absent: distinct experts of the layer that are not in slots, best score first.
          ids_TK: int32, what the tokens of the step chose; id E is padding.
        Returns:
          some of `absent`, each once, in the order in which they are computed.
        """
        raise NotImplementedError


ASSISTS = Registry("CPU assist", Assist, "assist_options", "moe_edge.offload")


def get_assist(assist: str | type | Assist, **options) -> Assist:
    """The assist of a name, a class, or an object.

    Raises:
      ConfigError: unknown name or option (the known ones are listed), or a bad value.
    """
    return ASSISTS.make(assist, options)
