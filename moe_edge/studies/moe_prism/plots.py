"""Pictures of refactoring: what neurons do inside experts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from moe_edge.core.figures import STYLE, plt


def _layer_colour(row: int, rows: int):
    return plt.get_cmap("viridis")(0.9 * row / max(rows - 1, 1))


def activation_sparsity(
    path: Path,
    *,
    layers: Sequence[int],
    magnitudes: np.ndarray,
    share_below: np.ndarray,
    lorenz: Mapping[str, np.ndarray],
    top_shares: Mapping[str, np.ndarray],
    top: float,
    title: str,
) -> None:
    """Magnitudes, and how much of a token's L1 norm the largest neurons carry.

    Args:
      path: PNG file to write.
      layers: ids of L layers.
      magnitudes: M values of |activation| / mean of the expert.
      share_below: [L, M], share of activations below each.
      lorenz: label -> [F + 1], share of L1 that the first neurons of an order carry.
      top_shares: label -> [L], share that the top neurons carry, by layer.
      top: which part of the neurons is "top".
      title: of the picture.
    """
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(
            1, 3, figsize=(13, 3.9), layout="constrained"
        )
        for row, layer in enumerate(layers):
            left.plot(
                magnitudes,
                share_below[row],
                color=_layer_colour(row, len(layers)),
                label=f"layer {layer}" if row in (0, len(layers) - 1) else None,
            )
        left.set_xscale("log")
        left.axvline(1.0, color="grey", linestyle=":", linewidth=1)
        left.set_title("Magnitudes of all activations", loc="left")
        left.set_xlabel("|activation| / mean of the expert")
        left.set_ylabel("share of activations below")
        left.legend(frameon=False)
        for label, share_F in lorenz.items():
            first_F = np.linspace(0, 1, len(share_F))
            middle.plot(first_F, share_F, label=label)
        middle.axvline(top, color="grey", linestyle=":", linewidth=1)
        middle.set_title("L1 norm of a token, all layers", loc="left")
        middle.set_xlabel("share of neurons, largest first")
        middle.set_ylabel("share of the L1 norm")
        middle.legend(frameon=False)
        width = 0.84 / len(top_shares)
        for number, (label, share_L) in enumerate(top_shares.items()):
            shift = (number - (len(top_shares) - 1) / 2) * width
            right.bar(np.arange(len(layers)) + shift, share_L, width, label=label)
        right.axhline(top, color="grey", linestyle=":", linewidth=1)
        right.set_xticks(range(len(layers)), [str(layer) for layer in layers])
        right.set_ylim(0, 1.15)
        right.set_title(f"L1 share of the top {100 * top:.0f} % of neurons", loc="left")
        right.set_xlabel("layer")
        right.legend(frameon=False, ncols=2, loc="upper right", fontsize=8)
        figure.suptitle(title)
        figure.savefig(path)
        plt.close(figure)
