"""One minimum of device memory: named before loading, accepted by the engine."""

import re

import jax
import numpy as np
import pytest

from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import CapacityError
from moe_edge.engine.device_needs import device_needs
from moe_edge.engine.load import check_checkpoint, load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import check_offload, make_offloaded
from moe_edge.engine.weights import load_weights, weight_shapes
from tests.support.layered import StoreReader
from tests.support.tiny_checkpoints import hf_folder
from tests.support.tiny_models import ALL

ROOM = {"batch": 3, "capacity": 100}


def least_of(error: CapacityError) -> int:
    return int(re.search(r"that is (\d+) bytes", str(error))[1])


def with_budget(num_bytes: int, **options) -> OffloadOptions:
    return OffloadOptions(device_memory=f"{num_bytes}B", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"slot_plan": "auto"},
        {"slot_plan": "equal"},
        {"slot_plan": "planned", "slot_plan_options": {"slots": [3, 5]}},
        {"predictor": "shadow"},
        {"predictor": "shadow", "predictor_options": {"precision": "full"}},
    ],
)
def test_the_minimum_that_a_check_names_is_the_engines(options):
    reader = StoreReader(ALL["gqa"])
    with pytest.raises(CapacityError, match="KV cache .* for 3 rows of 100 tok") as one:
        check_offload(reader, with_budget(1, **options), **ROOM)
    least = least_of(one.value)
    for check in (check_offload, make_offloaded):
        with pytest.raises(CapacityError, match=f"that is {least} bytes"):
            check(reader, with_budget(least - 1, **options), **ROOM)
    check_offload(reader, with_budget(least, **options), **ROOM)
    engine = make_offloaded(reader, with_budget(least, **options), **ROOM)
    assert engine.cache.spec.num_slots == {"equal": 4, "planned": 8}.get(
        options.get("slot_plan"), 2
    )
    engine.new_session(3, 100)
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shapes_of_a_checkpoint_take_what_its_weights_take(dtype, tmp_path):
    for family in ("qwen2_moe", "deepseek_v3", "gpt_oss"):
        reader = open_checkpoint(
            hf_folder(tmp_path / family, family, torch_dtype=dtype)
        )
        loaded = load_weights(reader, with_experts=False)
        assert weight_shapes(reader).num_bytes == loaded.num_bytes


def test_no_more_tokens_than_the_context_are_assumed():
    config, reader = ALL["gqa"], StoreReader(ALL["gqa"])
    records = jax.ShapeDtypeStruct((12, reader.layout.size), np.float32)
    given = OffloadOptions(), weight_shapes(reader), records, 2
    needs = device_needs(*given, 10**9)
    assert needs == device_needs(*given) and needs.tokens == config.max_positions


def test_room_for_staged_blocks_depends_on_how_slots_are_written(monkeypatch):
    reader = StoreReader(ALL["gqa"])
    records = jax.ShapeDtypeStruct((12, reader.layout.size), np.float32)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for layer_io, blocks in (("arrays", 5), ("packed", 9)):
        options = OffloadOptions(layer_io=layer_io)
        needs = device_needs(options, weight_shapes(reader), records)
        assert needs.staging == blocks * 4 * reader.layout.size


def test_a_dry_run_refuses_what_a_run_refuses():
    """`1B` named a minimum without weights and cache, and `--dry_run` accepted that."""
    with pytest.raises(
        CapacityError, match="dense weights .* for 1 row of 1024"
    ) as one:
        check_checkpoint("default", offload=with_budget(1))
    least = least_of(one.value)
    for options in (with_budget(147_456), with_budget(least - 1)):
        with pytest.raises(CapacityError, match=f"that is {least} bytes"):
            check_checkpoint("default", offload=options)
        with pytest.raises(CapacityError, match=f"that is {least} bytes"):
            load_engine("default", offload=options)
    load_engine("default", offload=with_budget(least)).engine.close()
