"""A running engine and its tokenizer from the name of a checkpoint.

Engines are imported when one is loaded: what only checks a checkpoint needs no JAX.
"""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from moe_edge.checkpoint.reader import CheckpointReader
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import Tokenizer, load_tokenizer
from moe_edge.core.checks import ConfigError, check_known
from moe_edge.core.heap import keep_heap
from moe_edge.core.progress import counter
from moe_edge.engine.devices import Devices, device_options, homes_for
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.kernels.switches import OFF_ON
from moe_edge.model.config import ModelConfig
from moe_edge.model.quantised import format_of, rounds_activations
from moe_edge.model.sub_experts import at_k

if TYPE_CHECKING:
    from moe_edge.engine.base import Engine
    from moe_edge.engine.mesh import DeviceMesh

WEIGHTS = ("copied", "mapped")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint ready to run."""

    engine: "Engine"  # holds the weights and `engine.config`
    tokenizer: Tokenizer | None  # None if it was not asked for
    hf_source: str | None  # Hugging Face folder (or GGUF file) it came from
    name: str  # what the caller asked for
    dtype: str  # of the experts as stored
    dense_kind: str | None = None  # of dense matrices in blocks, such as "q4_0"


def load_engine(
    checkpoint: str | Path,
    *,
    with_tokenizer: bool = True,
    offload: OffloadOptions | str | float | None = None,
    k: int | None = None,
    devices: Devices = None,
    activations: str = "float32",
    kv_cache: str = "float32",
    weights: str = "copied",
    **options,
) -> Loaded:
    """Opens a checkpoint (as `open_checkpoint` does) and loads it.

    Also tells the C library to keep freed memory (`core/heap.py`): prefill of 512
    tokens is about 15 % faster for it; and JAX, if it has not started, to run programs
    in the calling thread where a host plans every layer (`engine/inline.py`).

    Args:
      with_tokenizer: False where only token ids are used.
      offload: keeps experts off the device as it says; a budget alone ("25%", 0.25)
        takes the default policies; None: all are resident.
      k: experts a token computes, in a refactored model sub-experts; None: its own.
      devices: `DeviceOptions`, or how many share the experts: a number, or "all" of
        this machine. None: one, or all where one cannot hold the weights.
      activations: what few tokens are when they meet interleaved blocks of a quantised
        checkpoint: exact (float32), or rounded in blocks of 32 to 8 bits (int8): faster
        on a CPU, and lossy.
      kv_cache: how keys and values are kept: float32, exact; or bfloat16 or q8_0, in a
        half or about a quarter of the bytes, and lossy.
      weights: of a resident engine on a CPU: copied; or mapped: experts stay in the
        files of a checkpoint of ours, so that they take no memory that the system could
        not take back, and loading copies nothing.
      **options: of `ResidentEngine`, or of `make_offloaded`.
    Raises:
      CheckpointError: the checkpoint or its tokenizer is missing or damaged.
      CapacityError: a budget that is too small or too large.
      ConfigError: k out of range, more devices than there are (`mesh_for`), rounded
        activations where nothing would be rounded, heads that no blocks of q8_0 fill,
        or mapped weights where they cannot be (`check_weights`).
    """
    keep_heap()
    if offload is not None and not isinstance(offload, OffloadOptions):
        offload = OffloadOptions(device_memory=offload)
    reader = open_run(checkpoint, k, activations, kv_cache)
    # Before the weights: a missing tokenizer shows at once.
    tokenizer = load_tokenizer(reader) if with_tokenizer else None

    from moe_edge.engine.offloaded import make_offloaded
    from moe_edge.engine.resident import ResidentEngine
    from moe_edge.engine.weights import load_weights

    if offload is not None:
        prepare_process(reader, offload)
    check_backend(reader.config)
    # Conversion has checked our own format already.
    check_finite = not isinstance(reader, CheckpointReader)
    shared = device_options(devices)
    mesh = shared.mesh(reader, offload)
    check_weights(weights, reader, offload, mesh)
    with counter("loading the model"):
        if mesh is not None:
            from moe_edge.engine.split_attention import make_sharded

            options |= {"check_finite": check_finite}
            engine = make_sharded(reader, mesh, shared, **options)
        elif offload is None:
            given = {"check_finite": check_finite, "mapped": weights == "mapped"}
            engine = ResidentEngine(load_weights(reader, **given), **options)
        else:
            given = {
                "check_finite": check_finite,
                "devices": homes_for(reader, shared.devices),
            }
            engine = make_offloaded(reader, offload, **given, **options)
    hf_source = None if reader.hf_source is None else str(reader.hf_source)
    dtype = format_of(reader.layout.kind) or str(reader.dtype)
    parts = engine, tokenizer, hf_source, str(checkpoint), dtype
    return Loaded(*parts, dense_kind=format_of(reader.dense_kind))


def open_run(
    checkpoint: str | Path,
    k: int | None = None,
    activations: str = "float32",
    kv_cache: str = "float32",
):
    """An open checkpoint whose config says how it is to run; as of `load_engine`."""
    reader = open_checkpoint(checkpoint)
    config = at_k(reader.config, k).with_cache(kv_cache)  # weights stay the same
    reader.config = dataclasses.replace(config, activations=activations)
    kinds = f"{reader.layout.kind}+{reader.dense_kind}".split("+")
    if activations != "float32" and not any(map(rounds_activations, kinds)):
        raise ConfigError(
            f"activations {activations} meet weights in interleaved blocks, "
            f"{checkpoint} has none; convert it with --dtype q4_0 or q8_0"
        )
    return reader


def check_weights_of(weights: str, reader) -> None:
    """Refuses weights that are mapped of a checkpoint that has none to map, without
    opening a device.

    Raises:
      ConfigError: an unknown word; of mapped weights: a checkpoint that is not of ours
        or stores other numbers than programs take.
    """
    check_known("weights", weights, WEIGHTS)
    if weights == "copied":
        return
    from moe_edge.offload.store import check_mappable  # loads JAX

    check_mappable(reader)


def check_weights(
    weights: str, reader, offload: OffloadOptions | None, mesh: "DeviceMesh | None"
) -> None:
    """Refuses weights that are mapped where they cannot be; may start JAX.

    Raises:
      ConfigError: as `check_weights_of`; of mapped weights: experts that are offloaded,
        or that several devices or a GPU hold.
    """
    check_weights_of(weights, reader)
    if weights == "copied":
        return
    if offload is not None:
        raise ConfigError(
            "weights mapped are of an engine that keeps all experts, and they are "
            "offloaded; leave --weights out and bind offload.memory = 'mmap'"
        )
    import jax

    if mesh is not None or jax.default_backend() != "cpu":
        where = jax.default_backend() if mesh is None else f"{mesh.size} devices"
        raise ConfigError(
            f"weights mapped are of one CPU, and this model runs on {where}; leave "
            "--weights out"
        )


def check_backend(config: ModelConfig) -> None:
    """Refuses rounded activations where nothing rounds them, and a kernel for experts
    that is asked for and not known or not here; may start JAX."""
    asked = os.environ.get("MOE_EDGE_FEW_ROWS", "1")
    if config.moe_layers and asked not in OFF_ON:  # else nothing is to be opened
        from moe_edge.kernels import few

        few.check(config.moe.expert_kind)
    if config.activations == "float32":
        return
    import jax

    from moe_edge.kernels import native

    if jax.default_backend() != "cpu" or native.choice() != "native":
        raise ConfigError(
            f"activations {config.activations} are of the host kernels, and "
            f"{native.describe()} multiplies on {jax.default_backend()}; leave "
            "--activations out"
        )


def prepare_process(reader, offload: OffloadOptions | None) -> None:
    """What an offloaded engine to come needs decided before JAX starts.

    Where its programs run (`engine/inline.py`), and how much memory may be pinned
    (`offload/pinned.py`). For callers that ask JAX for something, or have
    `check_checkpoint` do so, before they load the engine.

    Args:
      reader: an open checkpoint.
    """
    if offload is not None:
        from moe_edge.engine.inline import run_inline

        allow_pinned(reader, offload)
        run_inline(offload)


def allow_pinned(reader, offload: OffloadOptions) -> None:
    """Sets how much memory JAX, if it has not started, lets the engine pin."""
    from moe_edge.offload.pinned import pinned_gib, raise_limit

    raise_limit(pinned_gib(reader, offload, offload.choose_mode("gpu")))


def check_checkpoint(
    checkpoint: str | Path,
    with_tokenizer: bool = True,
    offload: OffloadOptions | None = None,
    k: int | None = None,
    devices: Devices = None,
    activations: str = "float32",
    kv_cache: str = "float32",
    weights: str = "copied",
    **room,
) -> None:
    """What `load_engine` would refuse, without reading weights (for --dry_run).

    Args:
      devices, activations, kv_cache, weights: as of `load_engine`.
      **room: `batch` and `capacity` as `load_engine` will get them.
    """
    reader = open_run(checkpoint, k, activations, kv_cache)
    shared = device_options(devices)
    if with_tokenizer:
        load_tokenizer(reader)
    if offload is not None:
        from moe_edge.engine.offloaded import check_offload

        allow_pinned(reader, offload)  # `check_offload` starts JAX
        homes = homes_for(reader, shared.devices)
        check_offload(reader, offload, devices=homes, **room)
    shared.check(reader, offload)
    check_backend(reader.config)
    if weights != "copied":  # asks JAX for its devices
        check_weights(weights, reader, offload, shared.mesh(reader, offload))
