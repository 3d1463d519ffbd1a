"""Suite `traced`: offloaded decoding on the real link, routing from a recorded trace.

On a GPU: an OLMoE-shaped model of 7 B parameters and a DeepSeek-V2-Lite-shaped one of
16 B, experts in host memory. On a CPU: one of 0.45 B, so that the suite can be tried.
"""

import dataclasses
import functools
import gc
import itertools
import statistics
import time

import jax
import ml_dtypes
import numpy as np

from moe_edge.convert.families import config_from_hf
from moe_edge.engine.base import Engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.evaluate.texts import find_file
from moe_edge.model.config import ModelConfig
from moe_edge.studies.rounds import interleave, interleave_seconds
from moe_edge.studies.speed.models import olmoe_config
from moe_edge.studies.speed.suite import MS, Rows, SuiteSettings, make_row, speed_study
from moe_edge.studies.speed.traced_model import TracedReader, trace_choices
from moe_edge.workload.trace_reader import read_trace

TRACE_EXPERTS = 128
TOP_K = 6  # what the trace holds
STEPS = 48  # timed tokens; as many warm the cache before
BUDGETS = ("25%", "50%")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedSettings(SuiteSettings):
    """What suite `traced` reads; `SuiteSettings` names the rest.

    Attributes:
      data_dir: where `trace` is looked up.
      trace: route trace with TOP_K experts a token.
    """

    data_dir: str = "../shared/data"
    trace: str = "routing/trace_qwen3_30b_a3b.csv.gz"


DEEPSEEK_V2_LITE = {  # 16 B; what is left out is the family's default
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": TOP_K,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
}


def models() -> dict[str, ModelConfig]:
    """Name -> config of what this device can run; the models lie in memory only."""
    if jax.default_backend() == "cpu":
        found = {"olmoe_450m": olmoe_config(8, "bfloat16")}
    else:  # in the shape of OLMoE-1B-7B
        olmoe = olmoe_config(16, "bfloat16", hidden=2048, heads=16)
        found = {"olmoe_7b": olmoe | {"vocab_size": 50304}}
        found["deepseek_v2_lite_16b"] = DEEPSEEK_V2_LITE
    top = {"num_experts_per_tok": TOP_K}
    return {name: config_from_hf(config | top) for name, config in found.items()}


def seconds_per_token(engine: Engine, steps: int) -> float:
    """Mean over the trace's steps `steps` .. `2 * steps`, the earlier ones untimed."""
    session = engine.new_session(1, 2 * steps + 1)
    engine.prefill(session, [[0]])
    active_B = jax.device_put(np.ones(1, bool))
    started = 0.0
    for token in range(1, 2 * steps + 1):
        if token == steps + 1:
            engine.reset_records()
            started = time.perf_counter()
        tokens_B = jax.device_put(np.array([token], np.int32))
        # The next token is known beforehand, but a user waits for every one.
        engine.decode(session, tokens_B, active_B).block_until_ready()
    return (time.perf_counter() - started) / steps


def copy_rate(num_bytes: int, repeats: int = 20) -> float:
    """Bytes per second of host-to-device copies of one block, pinned where possible."""
    device = jax.local_devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    source = np.ones(num_bytes // 4, np.float32)
    copy = functools.partial(jax.numpy.array, source)
    if "pinned_host" in kinds and jax.default_backend() != "cpu":
        place = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        copy = functools.partial(jax.device_put, jax.device_put(source, place), device)
    cases = {"copy": lambda: copy().block_until_ready()}
    return num_bytes / statistics.median(interleave_seconds(cases, repeats)["copy"])


def trace_path(settings: TracedSettings) -> str:
    """Of the trace. Raises OSError where it is not found."""
    return find_file(settings.trace, settings.data_dir)


def traced_rows(settings: TracedSettings, work_dir) -> Rows:
    """Time per token at 25 % and 50 %, layered and fused, against all resident.

    `limit_fraction` of a row is the time that the missed bytes take at the measured
    copy rate, over the time per token.
    """
    del work_dir
    recorded = read_trace(trace_path(settings), num_experts=TRACE_EXPERTS)
    repeats = settings.repeats
    rows = []
    for name, config in models().items():
        chosen_SLK = trace_choices(recorded, config)
        steps = min(STEPS, (len(chosen_SLK) - 1) // 2)
        reader = TracedReader(config, chosen_SLK, ml_dtypes.bfloat16)
        # One after the other: a GPU has no room for both.
        resident = ResidentEngine(load_weights(reader))
        resident_ms = _alone_ms(resident, steps, repeats)
        del resident
        gc.collect()
        for budget, mode in itertools.product(BUDGETS, ("layered", "fused")):
            on_gpu = jax.default_backend() != "cpu" and mode == "layered"
            memory = "pinned" if on_gpu else "host"
            options = OffloadOptions(device_memory=budget, mode=mode, memory=memory)
            with make_offloaded(reader, options) as engine:
                ours_ms = _alone_ms(engine, steps, repeats)
                moved = engine.movement()
            rate = copy_rate(reader.layout.size * reader.dtype.itemsize)
            token_bytes = moved["bytes_moved"] / steps
            row = make_row(
                f"traced/{name}/{mode}/{budget}",
                ours_ms,
                "ms/token",
                peer=resident_ms,
                peer_name="all experts resident",
                hit_ratio=moved["hit_ratio"],
                bytes_per_token=token_bytes,
                copy_bytes_per_s=rate,
            )
            missed_ms = MS * token_bytes / rate
            rows.append(row | {"limit_fraction": missed_ms / row["ours"]})
            gc.collect()
    return rows


def _alone_ms(engine: Engine, steps: int, repeats: int) -> list[float]:
    """Milliseconds a token of `repeats` runs, after one that is not kept."""
    run = functools.partial(seconds_per_token, engine, steps)
    return [MS * seconds for seconds in interleave({"alone": run}, repeats)["alone"]]


STUDY = speed_study(
    "traced",
    "What does offloading cost a token on the real link, where routing repeats a "
    "recorded trace?",
    traced_rows,
    lambda settings, work_dir: list(models().items()),
    settings=TracedSettings,
    check=trace_path,
    limit="Random weights: speed only, no quality claim. Routers repeat a recorded "
    "trace.",
)
