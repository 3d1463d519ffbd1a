"""Engines of a study: one checkpoint, one store, one set of compiled programs.

A study compares dozens of policies. All their engines share weights, store and, for
equal shapes, programs; slots, cache, queue and predictor are each engine's own.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moe_edge.bench.prompts import AnyLinkSettings
from moe_edge.bench.study import weights_of
from moe_edge.convert.hf_config import FINE_TUNED, random_seed
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.process import alone
from moe_edge.engine.companion import Companion
from moe_edge.engine.generate import generate
from moe_edge.engine.inline import is_inline
from moe_edge.engine.layer_programs import LayerPrograms
from moe_edge.engine.layered import LayeredEngine
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import assemble
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import Weights, num_bytes
from moe_edge.model.config import ModelConfig
from moe_edge.model.quantised import bytes_per_weight
from moe_edge.offload.link import EmulatedLink, TransferLink
from moe_edge.offload.store import HostStore
from moe_edge.predict.base import get_predictor

# A run takes one of two times, 1 or 1.45, by the cores that the system gives JAX's
# thread and the kernels' on a machine of two: a median of few is either.
LAYER_RUNS = 20


def describe_model(checkpoint: str, weights: Weights, dtype: str) -> dict[str, Any]:
    """`model` of a results entry.

    Parameters of experts come from their bytes: padding counts.
    """
    config, narrow = weights.config, dtype in ("bfloat16", "uint16")
    each = bytes_per_weight(config.moe.expert_kind) or (2 if narrow else 4)
    dense = [
        *weights.top.values(),
        *(w for flat in weights.layers for w in flat.values()),
    ]
    return {
        "name": checkpoint,
        "params": sum(math.prod(weight.shape) for weight in dense)
        + int(num_bytes(weights.experts) / each),
        "weights": _made_by(config) or weights_of(checkpoint),
        "width": config.d_model,
        "experts": config.moe.num_experts,
        "neurons": config.moe.expert_dim,
    }


def _made_by(config: ModelConfig) -> str | None:
    """What config.json says of where its weights are from; None: nothing."""
    if (seed := random_seed(config)) is not None:
        return f"random, seed {seed}"
    made = config.hf_config.get(FINE_TUNED)
    return None if made is None else f"fine-tuned: {made}"


class Bench:
    """A checkpoint, resident and with its experts in a host store.

    Args:
      checkpoint: path or `default`.
      with_tokenizer: False where only token ids are used.
      settings: of a study that may use the machine's own link; None: it does not.

    Attributes:
      tokenizer: of the checkpoint; None if it was not asked for.
      resident: engine with all weights on the device.
      store: the experts on the host.
      model: `model` of a results entry.
      is_random: nothing has trained the weights, so that only times say something.
      companions: engines that run ahead of it, by what they are.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        with_tokenizer: bool = True,
        settings: AnyLinkSettings | None = None,
    ):
        self.checkpoint = checkpoint
        loaded = load_engine(checkpoint, with_tokenizer=with_tokenizer)
        self.tokenizer, self.resident = loaded.tokenizer, loaded.engine
        own_link = settings is not None and settings.link_factor is None
        is_pinned = own_link and jax.default_backend() == "gpu"
        memory = "pinned" if is_pinned else "host"
        self.store = HostStore(open_checkpoint(checkpoint), memory)
        weights = self.resident.weights
        empty = (None,) * len(weights.experts)
        self.weights = dataclasses.replace(weights, experts=empty)
        self.config = weights.config
        self.model = describe_model(loaded.name, weights, loaded.dtype)
        self.is_random = random_seed(self.config) is not None
        self._programs: LayerPrograms | None = None
        self._engines: list[LayeredEngine] = []
        self.companions: dict[str, Any] = {}

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_) -> None:
        for engine in self._engines:
            engine.close()

    def engine(
        self,
        options: OffloadOptions,
        batch: int = 1,
        with_trace: bool = False,
        devices: Sequence[jax.Device] = (),
    ) -> LayeredEngine:
        """An offloaded engine as `make_offloaded` would build it, on shared parts.

        Args:
          options: of mode `layered`, from the store's memory.
          batch: sequences whose KV cache an absolute budget leaves room for.
          with_trace: keep every lookup, with all scores, in `engine.trace`.
          devices: homes of the experts; one may be several.
        """
        engine = assemble(
            dataclasses.replace(options, memory=self.store.memory),
            self.weights,
            self.store,
            batch=batch,
            capacity=self.config.max_positions,
            with_trace=with_trace,
            programs=self._programs,
            shadow=self._shadow(options),
            devices=devices,
        )
        self._programs = engine.programs
        self._engines.append(engine)
        return engine

    def _shadow(self, options: OffloadOptions) -> Companion | None:
        """What a predictor lets run ahead: one of each kind for all engines."""
        if not options.has_shadow:
            return None
        predictor = get_predictor(options.predictor, **options.predictor_options)
        return predictor.companion(self.resident.weights, self.store, self.companions)

    def num_compiled(self) -> int:
        """Programs compiled so far, of all engines."""
        shared = 0 if self._programs is None else self._programs.num_compiled()
        shadows = sum(shadow.num_compiled() for shadow in self.companions.values())
        return shared + shadows + self.resident.num_compiled()

    @functools.cached_property
    def by_layer(self) -> ResidentEngine:
        """The resident engine of one layer a program: the host sees where each ends."""
        return ResidentEngine(self.resident.weights, layers_per_program=1)

    def layer_seconds(self, prompts, new_tokens: int) -> float:
        """`time_layer` of the resident engine.

        Where programs of this process are inline, in which a resident engine begins no
        step ahead, it is measured in another one: links are named by what users have.
        """
        if is_inline():
            return alone(load_and_time_layer, self.checkpoint, prompts, new_tokens)
        return time_layer(self.by_layer, prompts, new_tokens)

    def link_of(self, settings: AnyLinkSettings, layer_s: float) -> TransferLink:
        """The link of a study's engines; `layer_s`: resident compute of a layer."""
        if settings.link_factor is None:
            return TransferLink()
        return self.standard_link(
            layer_s, settings.link_factor, settings.link_latency_s
        )

    def load_seconds(self, link: TransferLink) -> float:
        """Median seconds until an expert is on the device over the machine's own link,
        asked for alone; 0 where the link is emulated, which says it itself."""
        if link.emulated:
            return 0.0
        layer, took_s = self.config.moe_layers[0], []
        for expert in range(self.store.num_experts):
            source_R = self.store.source(layer, expert)
            started_s = time.perf_counter()
            jax.device_put(source_R, jax.devices()[0]).block_until_ready()
            took_s.append(time.perf_counter() - started_s)
        return float(np.median(took_s))

    def standard_link(
        self, layer_s: float, factor: float, latency_s: float
    ) -> EmulatedLink:
        """An expert's bytes take `factor` layers of compute, plus the latency."""
        return EmulatedLink(self.store.block_bytes / (factor * layer_s), latency_s)


def load_and_time_layer(checkpoint: str | Path, prompts, new_tokens: int) -> float:
    """`time_layer` of a checkpoint's resident engine."""
    loaded = load_engine(checkpoint, with_tokenizer=False, layers_per_program=1)
    return time_layer(loaded.engine, prompts, new_tokens)


def time_layer(by_layer: ResidentEngine, prompts, new_tokens: int) -> float:
    """Seconds of one layer of a decode step, batch 1: the lower quartile of some runs.

    Embedding and head are counted in, as shares of the layers, which are programs
    of their own as in the offloading engines.
    """
    steps_s = []
    for prompt in itertools.islice(itertools.cycle(prompts), 1 + LAYER_RUNS):
        run = generate(by_layer, [prompt], new_tokens)
        steps_s.append(run.decode_s / run.steps)
    steps_s = steps_s[1:]  # 0: compilation
    return float(np.quantile(steps_s, 0.25)) / by_layer.config.num_layers


def record_history(resident: ResidentEngine, prompts, new_tokens: int) -> list[dict]:
    """What every layer chose for each prompt and its continuation, as
    `PredictorRun.learn` takes it."""
    sequences = []
    for prompt in prompts:
        found: dict[int, list] = {}

        def note(layer, routing, found=found):
            found.setdefault(layer, []).append(np.asarray(routing.ids_TK))

        generate(resident, [prompt], new_tokens, on_routing=note)
        sequences.append({layer: np.concatenate(ids) for layer, ids in found.items()})
    return sequences
