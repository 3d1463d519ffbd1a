"""Tiny refactored checkpoints of every family, and what a MoE layer of them adds."""

import functools
from pathlib import Path

import jax
import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.refactored_router import Judges, LevelRows
from moe_edge.convert.refactored_writer import Refactoring, write_refactored
from moe_edge.engine.weights import bind_block, block_graph, to_device
from moe_edge.model.record import RecordLayout
from moe_edge.model.sub_experts import split_config
from tests.support.profiles import numpy_act
from tests.support.tiny_checkpoints import hf_folder, raw_config

SUBS = 4
# Group routing by two experts has no linear gate (moe_edge/model/sub_experts.py).
UNGROUPED = dict.fromkeys(
    ("deepseek_v3", "deepseek_v32", "exaone_moe"), {"n_group": 1, "topk_group": 1}
)
WIDE = {"intermediate_size": 32, "moe_intermediate_size": 32}  # exportable: 4 x 8


def parent_folder(folder: Path, family: str, gate: str = "linear", **changes) -> Path:
    """A random HF folder of a family that `gate` can be built for."""
    changes = (UNGROUPED.get(family, {}) if gate == "linear" else {}) | changes
    return hf_folder(folder, family, **changes)


def wide_parent(folder: Path, family: str, **changes) -> Path:
    """One whose sub-experts are wide enough to be exported."""
    known = raw_config(family)
    wide = {name: width for name, width in WIDE.items() if name in known}
    return parent_folder(folder, family, **wide, **changes)


def random_refactoring(
    reader, gate: str = "linear", subs: int = SUBS, gate_neurons: int = 2, seed: int = 0
) -> Refactoring:
    """Random labels, and gate neurons or rows, for a parent."""
    moe = reader.config.moe
    E, F = moe.num_experts, moe.expert_dim
    rng = np.random.default_rng(seed)
    balanced_EF = np.tile(np.arange(F) % subs, (E, 1))
    labels = {i: rng.permuted(balanced_EF, axis=1) for i in reader.config.moe_layers}
    if gate == "linear":
        return Refactoring(config=split_config(reader.config, subs), labels=labels)
    if gate == "calibrated":
        D = reader.config.d_model
        rows = {
            layer: [
                LevelRows(
                    rng.standard_normal((subs, D)).astype(np.float32),
                    rng.standard_normal(subs).astype(np.float32),
                )
                for _ in range(E)
            ]
            for layer in labels
        }
        child = split_config(reader.config, subs, gate=gate)
        return Refactoring(config=child, labels=labels, rows=rows)
    judges = {}
    for layer, labels_EF in labels.items():
        members = np.argsort(labels_EF, axis=1, kind="stable").reshape(E, subs, -1)
        scale = rng.random((E, subs, gate_neurons)).astype(np.float32)
        prior = rng.random((E, subs)).astype(np.float32)
        judges[layer] = Judges(members[..., :gate_neurons], scale, prior)
    falling = -np.sort(-rng.random((moe.top_k, subs)), axis=1)
    shares = tuple(map(tuple, falling.tolist())) if gate == "proxy_pattern" else ()
    child = split_config(
        reader.config, subs, gate=gate, gate_neurons=gate_neurons, rank_shares=shares
    )
    return Refactoring(config=child, labels=labels, judges=judges)


def write_random(parent: Path, out: Path, gate: str = "linear", **options) -> Path:
    """Refactors a folder with random labels."""
    reader = open_checkpoint(parent)
    write_refactored(reader, random_refactoring(reader, gate, **options), out)
    return out


def layer_output(reader, config, layer: int, x_TD: np.ndarray):
    """(routing, what the routed experts add) of one MoE layer, at `config`'s K.

    The router is the model's; the experts are float64 NumPy, in no kernel's order.
    """
    dense = {name: to_device(a) for name, a in reader.dense_layer(layer).items()}
    routing = _route(config, config.like(layer), dense, x_TD)
    ids_TK, weights_TK = np.asarray(routing.ids_TK), np.asarray(routing.weights_TK)
    layout, y_TD = RecordLayout.of(config), np.zeros(x_TD.shape)
    for expert, record_R in enumerate(np.asarray(reader.experts(layer))):
        part = {n: layout.part(record_R, n).astype(float) for n in layout.shapes}
        gate_TF = x_TD @ part["gate"].T + part.get("gate_bias", 0.0)
        up_TF = x_TD @ part["up"].T + part.get("up_bias", 0.0)
        hidden_TF = numpy_act(gate_TF, up_TF, config.moe)
        out_TD = hidden_TF @ part["down"].T + part.get("down_bias", 0.0)
        weight_T = np.where(ids_TK == expert, weights_TK, 0.0).sum(axis=1)
        y_TD += weight_T[:, None] * out_TD
    return routing, y_TD


@functools.partial(jax.jit, static_argnums=(0, 1))
def _route(config, layer, dense, x_TD):
    return bind_block(block_graph(config, layer), dense).router(x_TD)


@functools.cache
def hidden_states(width: int, tokens: int = 64) -> np.ndarray:
    """Normed states, small enough that sigmoids and softmaxes do not saturate."""
    rng = np.random.default_rng(3)
    return (0.2 * rng.standard_normal((tokens, width))).astype(np.float32)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference in standard deviations of what is expected."""
    return float(np.abs(got - expected).max() / expected.std())
