"""Rows of suite `devices`: what each of several devices holds of a resident model."""

import jax
import numpy as np

from moe_edge.convert.open import open_checkpoint
from moe_edge.engine.mesh import local_mesh
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.sharded import ShardedEngine, load_sharded
from moe_edge.engine.weights import load_weights, num_bytes
from moe_edge.studies.speed.suite import Rows, make_row

MB = 1e6
NUMBERS = (2, 3, 4, 8)  # of devices, as far as the machine has them


def shared_rows(checkpoint, prompts: np.ndarray) -> Rows:
    """A row a number of devices: bytes of one of them, at most all but the experts and
    ceil(E / N) records a layer.

    Args:
      prompts: int32 [B, S], whose logits have to have the bits of one device.
    Raises:
      RuntimeError: other logits.
    """
    reader, rows = open_checkpoint(checkpoint), []
    one = ResidentEngine(load_weights(reader))
    weights = one.weights
    whole = num_bytes((weights.top, weights.layers))
    records = [records for records in weights.experts if records is not None]
    want = _logits(one, prompts)
    for count in NUMBERS:
        if count > len(jax.local_devices()):
            break
        mesh = local_mesh(count)
        engine = ShardedEngine(load_sharded(reader, mesh), mesh)
        if not np.array_equal(_logits(engine, prompts), want):
            raise RuntimeError(f"{count} devices gave other logits than one")
        # Records, and the table of who holds which.
        shares = [
            -(-len(each) // count) * each.nbytes // len(each) + 4 * len(each)
            for each in records
        ]
        row = make_row(
            f"experts on {count} devices, one of them",
            [engine.device_bytes() / MB],
            "MB",
            peer=[one.device_bytes() / MB],
            peer_name="one device",
            limit=(whole + sum(shares)) / MB,
        )
        rows.append(row)
    return rows


def _logits(engine: ResidentEngine, prompts: np.ndarray) -> np.ndarray:
    session = engine.new_session(*prompts.shape)
    return np.asarray(engine.prefill(session, prompts.tolist()))
