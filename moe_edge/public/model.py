"""A checkpoint as a library object: opened once, run by any number of engines."""

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_edge.convert.tokenizer import Tokenizer, load_tokenizer
from moe_edge.core.checks import ConfigError
from moe_edge.core.events import Recorder
from moe_edge.core.heap import keep_heap
from moe_edge.core.typed import changed
from moe_edge.engine.auto_memory import auto_memory
from moe_edge.engine.devices import check_devices
from moe_edge.engine.load import check_weights_of, open_run
from moe_edge.engine.sizes import check_context, reserved_tokens
from moe_edge.model.config import ModelConfig
from moe_edge.public.arguments import (
    LOAD_HINTS,
    OFFLOAD_HINTS,
    check_limits,
    read_record,
    refuse_unknown,
)
from moe_edge.public.options import OptionsReader
from moe_edge.public.parts import SharedParts

if TYPE_CHECKING:
    from moe_edge.public.engine import Engine
_PLAIN = (str, int, float, bool, dict, type(None))


def load(
    path: str | Path = "default",
    *,
    devices: int | str | None = None,
    activations: str = "float32",
    kv_cache: str = "float32",
    weights: str = "copied",
    **unknown: Any,
) -> "Model":
    """Opens a checkpoint. No weights are read until an engine is made.

    >>> import moe_edge as me
    >>> me.load("default")
    <moe_edge.Model default: 6 layers, 64 experts a layer>

    Args:
      path: a Hugging Face folder, a GGUF file, a folder of ours, or "default", the
        small model that comes with the package.
      devices: of this machine that share the experts: a number, or "all"; those of
        offloaded engines have homes there. None: one, or all for a resident engine
        whose weights one cannot hold.
      activations: what few tokens are when they meet interleaved blocks of a quantised
        checkpoint: "float32", exact; or "int8", rounded: faster on a CPU, and lossy.
      kv_cache: how keys and values are kept: "float32", exact; or "bfloat16" or "q8_0",
        in a half or about a quarter of the bytes: longer contexts fit, and lossy.
      weights: "copied" into memory; or "mapped", for resident engines on a CPU alone:
        experts stay in the files of a checkpoint of ours, and the system may take
        their memory back; exact.
    Raises:
      CheckpointError: nothing there (a name of the Hugging Face hub gets the command
        that downloads it), or a damaged checkpoint.
      ConfigError: a model that is not implemented, an unknown argument, activations
        that nothing would round, a cache whose blocks do not fill a head, or mapped
        weights of a checkpoint that has none to map.
    """
    known = ("path", "devices", "activations", "kv_cache", "weights")
    refuse_unknown("load", unknown, known, LOAD_HINTS)
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(
            f"path is {path!r:.60}, expected a folder, a file or 'default'"
        )
    devices = check_devices(devices)
    # The working directory may change before weights are read.
    is_file = str(path) != "default" and Path(path).exists()
    source = Path(path).absolute() if is_file else path
    reader = open_run(source, activations=activations, kv_cache=kv_cache)
    check_weights_of(weights, reader)
    return Model(str(path), reader, str(source), devices, weights)


class Model:
    """A checkpoint, opened by `load`. Its engines share what they can (`parts.py`).

    >>> model = me.load("default")
    >>> model.config.num_layers, model.config.moe.num_experts, model.expert_bytes
    (6, 64, 73728)
    >>> model.tokenizer.encode("Once upon a time")
    [1009, 1241, 260, 903]

    Attributes:
      name: what it was opened by.
      config: its sizes (`ModelConfig`).
      source: what opens it again, wherever the process is.
      devices: as given to `load`, checked.
      options: checks the options of its engines.
    """

    def __init__(
        self,
        name: str,
        reader: Any,
        source: str,
        devices: int | str | None = None,
        weights: str = "copied",
    ):
        self.source, self.devices = source, devices
        self.name, self._reader = name, reader
        self.config: ModelConfig = reader.config
        self._parts = SharedParts(reader, devices, weights)
        self.options = OptionsReader(reader, weights)

    def __repr__(self) -> str:
        config, experts = self.config, "dense"
        if config.moe_layers:
            experts = f"{config.moe.num_experts} experts a layer"
        return f"<moe_edge.Model {self.name}: {config.num_layers} layers, {experts}>"

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be texts."""
        return self._reader.tokenizer_path is not None

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Text <-> ids; CheckpointError where the checkpoint has none."""
        return load_tokenizer(self._reader)

    @property
    def expert_bytes(self) -> int | None:
        """Bytes of one expert as it travels to the device; None of a dense model."""
        if not self.config.moe_layers:
            return None
        from moe_edge.offload.store import widened

        return self._reader.layout.num_bytes(widened(self._reader.dtype))

    def resident(
        self,
        *,
        max_batch: int = 8,
        max_context: int | None = None,
        split_attention: bool = False,
        **unknown: Any,
    ) -> "Engine":
        """An engine with all weights on the device, the reference of offloaded ones.

        >>> with model.resident(max_batch=2) as engine:
        ...     [out.text for out in engine.generate(["One", "Two"], 2)]
        [', and', ', and']

        Args:
          max_batch: prompts that run together.
          max_context: most tokens of a prompt and its continuation; None: the model's.
          split_attention: each of several devices computes its heads of attention and
            keeps their part of the KV cache.
        Raises:
          ConfigError, CapacityError: a bad limit, an unknown argument, more devices
            than there are, heads that they cannot share, or mapped weights where they
            cannot be: on several devices, or on a GPU.
        """
        known = ("max_batch", "max_context", "split_attention")
        refuse_unknown("resident", unknown, known, OFFLOAD_HINTS)
        self._check_limits(max_batch, max_context)
        keep_heap()
        from moe_edge.public.engine import Engine

        core = self._parts.resident(split_attention)
        return Engine(core, self, max_batch=max_batch, max_context=max_context)

    def offload(
        self,
        device_memory: str | float = "50%",
        *,
        max_batch: int = 1,
        max_context: int | None = None,
        record: tuple[str, ...] = (),
        **options: Any,
    ) -> "Engine":
        """An engine whose experts live on the host and travel when they are needed.

        >>> with model.offload(0.5, eviction="lru") as engine:
        ...     engine.generate("Once upon a time", max_new_tokens=4).text
        ', and the first'

        Args:
          device_memory: for experts: a share of their bytes ("25%", 0.25); or a size
            ("2GiB") that also holds dense weights, KV cache and staging; or "auto":
            such a size, nine tenths of what the device has free. On a CPU that does not
            hold all experts a plan of about a minute (`moe_edge.plan`) then chooses
            what `options` leave open, for tokens drawn at temperature 1. Of several
            devices, for each, and without a plan.
          max_batch: prompts that run together; max_context: most tokens of a prompt and
            its continuation. A size reserves their KV cache (None: of 1024 tokens, as
            the commands).
          record: what the engine keeps of its run: "trace" (every lookup), "events"
            (transfers and waits).
          **options: fields of `OffloadOptions`: eviction, predictor, route and assist,
            each a name, a class or an object; eviction_options, ..., for a name or a
            class; mode ("auto"), slot_plan ("auto"), horizon, memory, ...
        Raises:
          ConfigError: an unknown argument or name, what is no policy, options that
            exclude each other or do not fit the model, or a model of mapped weights.
          CapacityError: a budget of too few slots (the least is named), or above what
            the machine has.
        """
        if isinstance(device_memory, str) and device_memory == "auto":
            self.options.read("1B", options)  # before JAX says what is free
            device_memory = self._auto_memory(options.get("memory"))
            self._check_limits(max_batch, max_context)
            if not read_record(record) and len(self._parts.homes) < 2:
                options = self._planned(device_memory, options, max_batch, max_context)
        given = self.options.read(device_memory, options)
        self._check_limits(max_batch, max_context)
        record = read_record(record)
        recorder = Recorder(enabled="events" in record)
        keep_heap()
        core = self._parts.offloaded(
            given, max_batch, max_context, "trace" in record, recorder
        )
        from moe_edge.public.engine import Engine

        return Engine(
            core,
            self,
            max_batch=max_batch,
            max_context=max_context,
            recorder=recorder,
        )

    def _auto_memory(self, memory: Any) -> str:
        """The size that `auto` stands for now, with experts in `memory`."""
        has_records = self._parts.has_records or memory == "mmap"
        return auto_memory(self._reader, self._parts.homes, has_records)

    def _planned(
        self, budget: str, options: dict[str, Any], batch: int, context: int | None
    ) -> dict[str, Any]:
        """Options that a short plan adds to those that were given, in a budget.

        Policies of one's own, as classes or objects, are run as they are.
        """
        if any(type(value) not in _PLAIN for value in options.values()):
            return options
        from moe_edge.planner.auto import chosen_options

        tokens = min(reserved_tokens(context), self.config.max_positions)
        new = max(3, tokens // 8)
        asked = {"batch": batch, "context": tokens, "new_tokens": new}
        asked["prompt_tokens"] = max(1, min(128, tokens - new))
        cache = self.config.cache_type
        found = chosen_options(self.source, budget, options, kv_cache=cache, **asked)
        return {n: v for n, v in changed(found).items() if n != "device_memory"}

    def _check_limits(self, max_batch: Any, max_context: Any) -> None:
        check_limits(max_batch, max_context)
        if max_context is not None:
            check_context(max_context, self.config)
