"""What tests of work beside a program share: what its streams were given, and steps."""

import jax

from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.offloaded import make_offloaded
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.kernels import side_calls
from tests.support.host_kernels import host_device
from tests.support.layered import StoreReader, forced_logits
from tests.support.tiny_models import random_prompts


def watching(open_calls):
    """For a fixture: the calls are open, and the streams noted while a test runs."""
    open_calls()
    side_calls.watch(True)
    yield
    side_calls.watch(False)


def pinned(array) -> jax.Array:
    """In the host's pinned memory."""
    place = jax.sharding.SingleDeviceSharding(host_device(), memory_kind="pinned_host")
    return jax.device_put(array, place)


def beside_resident(reader: StoreReader, lengths, options: OffloadOptions, steps: int):
    """Logits of the resident engine and of an offloaded one; that engine, and what its
    streams were given."""
    prompts = random_prompts(reader.config, lengths)
    want = forced_logits(ResidentEngine(load_weights(reader)), prompts, steps)
    with make_offloaded(reader, options) as engine:
        side_calls.watch(True)
        got = forced_logits(engine, prompts, steps)
        noted = side_calls.watch(False)
    return want, got, engine, noted
