"""SMoE, figures 3 and 8: what an expert takes on the host, on the device, on the link.

Experts of the paper's three models' shapes, with random weights: their time depends on
bytes and shapes alone. Some take turns, so that weights come from memory, as in
decoding. Device and link do all of them before anybody waits, and a time is the mean of
one: a launch is not counted to each. The link is what blocks travel over to device
slots; where the device is the CPU that is a copy in memory.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from moe_edge.bench.rounds import interleave, seconds_of
from moe_edge.bench.settings import Seed, StudySettings, by
from moe_edge.bench.study import Study
from moe_edge.core.checks import ConfigError
from moe_edge.kernels import native
from moe_edge.metrics.frames import Rows, Tables, frame, median
from moe_edge.model.config import ModelConfig
from moe_edge.model.experts import run_experts
from moe_edge.model.record import RecordLayout
from moe_edge.offload.assist import HostExperts
from moe_edge.offload.slots import make_slots
from moe_edge.training.default_config import default_config

HOST, DEVICE, LINK = "host", "device", "link"
FORM = re.compile(r"(.+) ([0-9]+)/([0-9]+)")


def parse_shape(text: str) -> tuple[str, int, int]:
    """`name 2048/1408`: a model, its width and an expert's neurons.

    Raises:
      ConfigError: another form.
    """
    found = FORM.fullmatch(text)
    if found is None or int(found[2]) % 8 or not int(found[2]) or not int(found[3]):
        raise ConfigError(
            f"shape is {text!r}, expected a name, a space and width/neurons such as "
            "'deepseek-moe-16b 2048/1408', the width a multiple of 8"
        )
    return found[1], int(found[2]), int(found[3])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSettings(StudySettings):
    """The size of the study.

    Attributes:
      shapes: see `parse_shape`; weights are bfloat16.
      tokens: of a call.
      experts: that take turns; more than the caches hold.
      repeats: measured calls of each.
    """

    shapes: Sequence[Annotated[str, by(parse_shape)]] = (
        "deepseek-moe-16b 2048/1408",
        "XVERSE-MoE-A4.2B 2560/1728",
        "Qwen2-57B-A14B 3584/2560",
    )
    tokens: Sequence[int] = (1, 2, 4, 8, 16)
    experts: int = 16
    repeats: int = 15
    seed: Seed = 0

    def __post_init__(self):
        super().__post_init__()
        names = [parse_shape(shape)[0] for shape in self.shapes]
        if len(set(names)) < len(names):
            raise ConfigError(f"shapes are named {names}; give each a name of its own")
        if self.experts < 2:
            raise ConfigError(
                f"experts is {self.experts}, expected 2 or more: they take turns, so "
                "that weights come from memory"
            )


def measure(settings: ExpertSettings, rows: Rows) -> None:
    """Measures all shapes."""
    for shape in settings.shapes:
        name, width, neurons = parse_shape(shape)
        for (what, tokens), s in time_shape(width, neurons, settings).items():
            rows("experts", name, what, tokens, time_ms=median(s, scale=1e3))
    rows.about |= {
        "model": {
            "name": "single experts",
            "params": None,
            "weights": "random, bfloat16",
        },
        "workload": dataclasses.asdict(settings) | {"kernels": native.describe()},
    }


def time_shape(width: int, neurons: int, settings: ExpertSettings):
    """Seconds by (what, tokens), one a repeat; the link's tokens are 0."""
    config = default_config(d_model=width, expert_dim=neurons, head_dim=width // 8)
    layout, rng = RecordLayout.of(config), np.random.default_rng(settings.seed)
    record_R = rng.normal(0, 0.02, layout.size).astype(jnp.bfloat16).view(np.uint16)
    records = [np.roll(record_R, n) for n in range(settings.experts)]
    slots = make_slots(settings.experts, layout.size, records[0].dtype)
    for n, record_R in enumerate(records):
        slots.write(n, record_R)
    on_host = HostExperts(config, records)
    on_device, turns = _device_program(config), itertools.cycle(range(settings.experts))

    def copy() -> None:
        for number, record_R in enumerate(records):
            slots.write(number, record_R)
        jax.block_until_ready(slots.array)

    calls: dict[tuple[str, int], Callable[[], None]] = {(LINK, 0): copy}
    for tokens in settings.tokens:
        x_TD = rng.normal(size=(tokens, width)).astype(np.float32)
        routing = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32)

        def host(x_TD=x_TD, routing=routing) -> None:
            one = next(turns)
            on_host.outputs([one], x_TD, routing[0] + one, routing[1])

        def device(x_TD=jax.device_put(x_TD)) -> None:  # noqa: B008
            on_device(x_TD, slots.array).block_until_ready()

        calls |= {(HOST, tokens): host, (DEVICE, tokens): device}
    timed = {key: functools.partial(seconds_of, call) for key, call in calls.items()}
    found = interleave(timed, settings.repeats)
    of_all = settings.experts
    return {
        (what, tokens): [one / (1 if what == HOST else of_all) for one in s]
        for (what, tokens), s in found.items()
    }


def _device_program(config: ModelConfig):
    """All experts in slots, one after another, of the same tokens."""
    layout = RecordLayout.of(config)

    def device(x_TD, slots_SR):
        weights_T1 = jnp.ones((len(x_TD), 1), jnp.float32)

        def run_one(number, y_TD):
            ids_T1 = jnp.full((len(x_TD), 1), number, jnp.int32)
            return y_TD + run_experts(x_TD, ids_T1, weights_T1, slots_SR, layout)

        return jax.lax.fori_loop(0, len(slots_SR), run_one, jnp.zeros_like(x_TD))

    return jax.jit(native.within(device))


def derive(tables: Tables) -> dict[str, Any]:
    """An expert on the host over its load, and how its time grows with tokens."""
    experts = tables["experts"]
    host, link = (experts[experts.what == what] for what in (HOST, LINK))
    least, most = host.tokens.min(), host.tokens.max()
    by_tokens = host.pivot(index="model", columns="tokens", values="time_ms")
    link_ms = link.set_index("model").time_ms
    ratios = pd.DataFrame(
        {
            "over_load": by_tokens[least] / link_ms,
            "grows": by_tokens[most] / by_tokens[least],
        }
    )
    return {
        "ratios": ratios.loc[link.model].reset_index(),
        "least": least,
        "most": most,
        "links": link,
        "calls": experts[experts.what != LINK],
        "single": experts[experts.tokens.isin((0, least))],
    }


FRAMES = {"experts": frame("model what tokens", "time_ms")}
STUDY = Study(
    "smoe_fig3", ExpertSettings, measure, FRAMES, derive, start={"repeats": 5}
)
