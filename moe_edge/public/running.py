"""The life of a running engine: from its making to `close`, and what it counted."""

import gc
from typing import TYPE_CHECKING, Any, Self

from moe_edge.core.checks import ConfigError
from moe_edge.core.events import Event, Recorder
from moe_edge.engine.base import Engine as Core
from moe_edge.engine.inline import is_inline
from moe_edge.public.call import Traffic
from moe_edge.public.output import Measured
from moe_edge.public.prompts import PromptReader
from moe_edge.workload.traces import Trace

if TYPE_CHECKING:
    from moe_edge.public.model import Model


class Running:
    """What `Engine` computes with; a context manager.

    Args:
      core: the engine below.
      model: that it runs.
      max_batch, max_context: see `Engine`.
      recorder: of events; None: there are none.
    """

    def __init__(
        self,
        core: Core,
        model: "Model",
        *,
        max_batch: int,
        max_context: int | None = None,
        recorder: Recorder | None = None,
    ):
        self.name, self.max_batch, self.max_context = model.name, max_batch, max_context
        self._core: Core | None = core  # None: closed
        self._model, self._recorder = model, recorder
        self._reader = PromptReader(model, max_context)
        self._cache_bytes, self._total = 0, Measured()
        self._traffic = Traffic()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        mode = self._core.expert_state().mode if self._core else "closed"
        return f"<moe_edge.Engine of {self.name}, {mode}>"

    def close(self) -> None:
        """Ends what runs in the background, and frees the slots; may be called twice.

        Other engines of the model go on.

        >>> engine = model.offload("25%")
        >>> engine.close()
        >>> engine.generate("Once upon a time")
        Traceback (most recent call last):
        ...
        moe_edge.core.checks.ConfigError: the engine of default is closed; ...
        """
        if (core := self._core) is not None:
            self._traffic.give()
            core.close()
            self._core = core = None
            gc.collect()  # programs of an engine hold it, and it holds them

    def _open(self) -> Core:
        if self._core is None:
            raise ConfigError(
                f"the engine of {self.name} is closed; make another one with "
                "model.offload() or model.resident()"
            )
        return self._core

    @property
    def core(self) -> Core:
        """The engine below this one, for researchers: its interface may change."""
        return self._open()

    @property
    def link(self) -> str:
        """How experts come to the device: "real", or the rate of an emulated link.

        >>> engine.link
        'real'
        """
        found = self._open().report().get("link", {"emulated": False})
        if not found["emulated"]:
            return "real"
        rate, latency = found["bytes_per_s"] / 1e9, found["latency_s"] * 1e6
        return f"emulated, {rate:.3g} GB/s, {latency:.3g} us"

    @property
    def lossless(self) -> bool:
        """Whether its tokens are those of the resident engine.

        >>> engine.lossless
        True
        """
        return self._open().lossless

    def _quiet(self) -> Core:
        """The engine; what it moves from here on is no open stream's."""
        core = self._open()
        self._traffic.give()
        return core

    def reset(self) -> None:
        """Empties the slots, and forgets what was counted and recorded so far.

        A stream under way goes on, and is in no statistics.

        >>> engine.reset()
        >>> engine.stats()["bytes_moved"]
        0
        """
        core = self._open()
        self._traffic.give()
        core.restart()
        self._total = Measured()

    def stats(self) -> dict[str, Any]:
        """As `Output.stats`, of all calls since the engine was made or `reset`.

        And `inline`: whether programs of this process run in the thread that calls them
        (`moe_edge.run_inline`). It is a setting of the process.

        >>> sorted(engine.stats())  # doctest: +NORMALIZE_WHITESPACE
        ['bytes_moved', 'compile_s', 'device_bytes', 'hit_ratio', 'inline',
         'tokens_per_s', 'tpot_s', 'ttft_s']
        """
        inline = {"inline": is_inline()}
        return self._total.stats(self._device_bytes()) | inline

    def _device_bytes(self) -> int:
        return self._open().device_bytes() + self._cache_bytes

    @property
    def trace(self) -> Trace:
        """Every lookup since `reset`, of an engine made with record=("trace",).

        Rows are tokens at layers: `ids_TK` int32 (T, K), experts best first;
        `weights_TK` float32; `scores_TE` float16 (T, E); `phase`, `step`, `layer` and
        `request` int32 (T,). `moe_edge.replay` takes it.

        >>> with model.offload("25%", record="trace") as recording:
        ...     out = recording.generate([1, 2], max_new_tokens=3, ignore_eos=True)
        ...     recording.trace.ids_TK.shape  # (2 + 2 tokens) x 6 layers, 8 experts
        (24, 8)

        Raises:
          ConfigError: an engine that keeps none, or one that has looked nothing up.
        """
        recorder = getattr(self._open(), "trace", None)
        if recorder is None:
            raise ConfigError(
                "this engine keeps no trace; make it with record=('trace',)"
            )
        return recorder.trace()

    @property
    def events(self) -> list[Event]:
        """Transfers and waits since `reset`, of one made with record=("events",).

        Times are seconds since the engine was made, payloads bytes.

        >>> with model.offload("25%", record="events") as recording:
        ...     out = recording.generate("Once upon a time", max_new_tokens=2)
        ...     sum(event.bytes for event in recording.events) > 0
        True

        Raises:
          ConfigError: an engine that keeps none.
        """
        self._open()
        if self._recorder is None or not self._recorder.enabled:
            raise ConfigError(
                "this engine keeps no events; make it with record=('events',)"
            )
        return self._recorder.events()
