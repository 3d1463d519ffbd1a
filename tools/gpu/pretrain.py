"""A larger default model: the training kernel against `ragged_dot`, then training.

The kernel (`training/expert_grad.py`) was written for CPUs: its values and gradients
are compared with those of JAX's own grouped product first, at the sizes of the run, and
the training starts only if they agree. It goes on where it stopped.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_edge.model.record import RecordLayout
from moe_edge.training.expert_grad import Kernel, train_experts

ROOT, ON_GPU = Path(__file__).parents[2], jax.default_backend() == "gpu"
# 86 million parameters, of which a token meets 20.
SIZES = {"d_model": 512, "num_layers": 8, "num_experts": 64, "expert_dim": 96}
# Of a batch that is trained on, and of the comparison.
BATCH, TOKENS = (16384, 16384) if ON_GPU else (1024, 64)
TOP_K, MOST_APART = 8, 1e-4
SMALL = {"d_model": 64, "num_layers": 2, "num_experts": 8, "expert_dim": 32}
SMALL |= {"task_characters": 20_000, "vocab_size": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out_dir", required=True, help="folder of pretrain.json")
    parser.add_argument(
        "--data_dir",
        default="../shared/data",
        help="texts; where it is missing, Python's library and tasks train",
    )
    parser.add_argument("--run_dir", help="of the run; default OUT_DIR/larger_default")
    parser.add_argument("--minutes", type=float, default=8, help="of training")
    given = parser.parse_args()
    report = common.Report("pretrain", given.out_dir)
    sizes = SIZES if ON_GPU else SMALL
    layout = RecordLayout(sizes["d_model"], sizes["expert_dim"])
    apart = _apart(layout, sizes["num_experts"])
    report.add("kernel beside ragged_dot, of the standard deviation", apart)
    if not max(apart.values()) <= MOST_APART:
        sys.exit(
            f"the training kernel is off by {apart}, at most {MOST_APART} is right"
        )
    tokens = {"batch_tokens": BATCH, "max_minutes": given.minutes}
    run = sizes | tokens | {"decay_minutes": given.minutes / 4}
    run |= {"train_tokens": 10**10}
    flags = [word for name, value in run.items() for word in (f"--{name}", f"{value}")]
    # As a flag, a folder that is missing would be refused.
    flags += ["--gin_param", f"pretrain.data_dir = {str(given.data_dir)!r}"]
    script = [sys.executable, str(ROOT / "launch/pretrain.py"), *flags]
    run_dir = given.run_dir or Path(given.out_dir) / "larger_default"
    script += ["--out_dir", str(run_dir)]
    code = subprocess.run(script).returncode
    report.add("exit code of training", code)
    sys.exit(code)


def _apart(layout: RecordLayout, experts: int) -> dict[str, float]:
    """Largest differences from `ragged_dot`: of sums and of each gradient."""
    rng = np.random.default_rng(0)
    x_TD = rng.standard_normal((TOKENS, layout.d_model), np.float32)
    ids_TK = np.argsort(rng.random((TOKENS, experts)), axis=1)[:, :TOP_K]
    weights_TK = rng.random((TOKENS, TOP_K), np.float32)
    experts_ER = 0.05 * rng.standard_normal((experts, layout.size), np.float32)
    target_TD = jnp.asarray(rng.standard_normal(x_TD.shape, np.float32))
    ids_TK = jnp.asarray(ids_TK, jnp.int32)

    def ours(x_TD, weights_TK, experts_ER):
        return train_experts(x_TD, ids_TK, weights_TK, experts_ER, Kernel(layout))

    def theirs(x_TD, weights_TK, experts_ER):
        order_P = jnp.argsort(ids_TK.reshape(-1))
        counts_E = jnp.bincount(ids_TK.reshape(-1), length=experts)

        def product(rows_PI, name):
            weight_EIO = layout.part(experts_ER, name).swapaxes(1, 2)
            given = rows_PI, weight_EIO, counts_E
            return lax.ragged_dot(*given, precision=lax.Precision.HIGHEST)

        rows_PD = x_TD[order_P // TOP_K]
        mid_PF = jax.nn.silu(product(rows_PD, "gate")) * product(rows_PD, "up")
        out_PD = weights_TK.reshape(-1)[order_P, None] * product(mid_PF, "down")
        return jnp.zeros_like(x_TD).at[order_P // TOP_K].add(out_PD)

    @jax.jit
    def both(*given):
        found = []
        for function in (ours, theirs):
            y_TD, back = jax.vjp(function, *given)
            found.append((y_TD, *back(target_TD)))
        return found

    names = "sums", "rows", "weights", "experts"
    pairs = zip(*both(x_TD, weights_TK, experts_ER), strict=True)
    far = [common.apart([np.asarray(a)], [np.asarray(b)]) for a, b in pairs]
    return dict(zip(names, far, strict=True))


if __name__ == "__main__":
    main()
