"""The small networks of boards: one judges a component type, one its place.

Both see a tight 32 x 32 crop. About 80 k parameters at width 16.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.papers.coserve.coe.layers import Weights, conv, halve, linear

Judged = tuple[str, dict[str, float]]
# A component lies right if it is moved and turned less; `workload/board.py` draws
# sound ones below 1.13 pixels and 3 degrees, others from 1.87 or 11 on.
MOST_SHIFT, MOST_TURN = 1.5, 7.0
BRANCH_GAIN = 0.5  # of a fresh residual branch


@dataclasses.dataclass(frozen=True)
class BoardResnet:
    """A classifier: which of the verdicts is it?

    Mean and maximum of each channel go into the last layer: a crack is small, and its
    mean is next to nothing.

    Attributes:
      width: channels of the first stage.
    """

    width: int = 16

    def __post_init__(self):
        check_count("width", self.width)

    def check(self, input_shape: Sequence[int], verdicts: Sequence[str]) -> None:
        """ConfigError: it can not judge such images so."""
        check_sides("board_resnet", input_shape, 8)

    def compute(self, w: Weights, x_NHWC: jax.Array, verdicts: Sequence[str]):
        """Logits, float32 [N, O]."""
        x_NHWC = trunk(w, x_NHWC, self.width)
        pooled = [x_NHWC.mean(axis=(1, 2)), x_NHWC.max(axis=(1, 2))]
        return linear(w, "head", jnp.concatenate(pooled, axis=-1), len(verdicts))

    def judge(self, outputs_NO: np.ndarray, verdicts: Sequence[str]) -> list[Judged]:
        return most_likely(outputs_NO, verdicts)


@dataclasses.dataclass(frozen=True)
class BoardDetector:
    """Where does the component lie on its footprint, and which way round?

    It regresses how far the component's middle is from where it belongs (in pixels) and
    cosine and sine of its turn; the verdict follows by fixed limits.

    Attributes:
      width: channels of the first stage.
    """

    width: int = 16

    def __post_init__(self):
        check_count("width", self.width)

    def check(self, input_shape: Sequence[int], verdicts: Sequence[str]) -> None:
        """ConfigError: it can not judge such images so."""
        check_sides("board_detector", input_shape, 8)
        wanted = ["ok", "misaligned", "wrong_polarity"]
        if list(verdicts) != wanted:
            raise ConfigError(
                f"outputs of board_detector are {list(verdicts)}, expected {wanted}"
            )

    def compute(self, w: Weights, x_NHWC: jax.Array, verdicts: Sequence[str]):
        """Shift in x and in y, cosine and sine of the turn: float32 [N, 4]."""
        x_NHWC = trunk(w, x_NHWC, self.width)  # where a feature lies matters here
        return linear(w, "head", x_NHWC.reshape(len(x_NHWC), -1), 4)

    def judge(self, outputs_NO: np.ndarray, verdicts: Sequence[str]) -> list[Judged]:
        x_N, y_N, cos_N, sin_N = np.asarray(outputs_NO, np.float64).T
        turn_N = np.rad2deg(np.arctan2(sin_N, cos_N))
        found = []
        for x, y, turn in zip(x_N.tolist(), y_N.tolist(), turn_N.tolist(), strict=True):
            scores = {"shift_x": x, "shift_y": y, "turn": turn}
            off = np.hypot(x, y) > MOST_SHIFT or MOST_TURN < abs(turn)
            verdict = "misaligned" if off else "ok"
            found.append(("wrong_polarity" if abs(turn) > 90 else verdict, scores))
        return found


def trunk(w: Weights, x_NHWC: jax.Array, width: int) -> jax.Array:
    """Three residual stages: float32 [N, H / 8, W / 8, 4 width] of images 0..1."""
    x_NHWC = conv(w, "stem", 4 * (x_NHWC - 0.5), width, stride=2, act=jax.nn.relu)
    for stage, channels in enumerate((width, 2 * width, 4 * width)):
        name, stride = f"stage{stage}", 1 if stage == 0 else 2
        y = conv(w, f"{name}.a", x_NHWC, channels, stride=stride, act=jax.nn.relu)
        y = conv(w, f"{name}.b", y, channels, gain=BRANCH_GAIN)
        if stage:
            x_NHWC = conv(w, f"{name}.skip", halve(x_NHWC), channels, size=1)
        x_NHWC = jax.nn.relu(x_NHWC + y)
    return x_NHWC


def check_sides(module: str, input_shape: Sequence[int], unit: int) -> None:
    """ConfigError: images are not [H, W, 3] with sides that `unit` divides."""
    H, W, C = input_shape
    if H % unit or W % unit or C != 3:
        raise ConfigError(
            f"input_shape of {module} is {list(input_shape)}, expected sides that are "
            f"multiples of {unit}, and 3 colours"
        )


def most_likely(outputs_NO: np.ndarray, verdicts: Sequence[Any]) -> list[Judged]:
    """The verdict of the largest logit, with the softmax of all."""
    logits_NO = np.asarray(outputs_NO, np.float64)[:, : len(verdicts)]
    shares_NO = np.exp(logits_NO - logits_NO.max(axis=1, keepdims=True))
    shares_NO /= shares_NO.sum(axis=1, keepdims=True)
    return [
        (verdicts[int(row.argmax())], dict(zip(verdicts, row.tolist(), strict=True)))
        for row in shares_NO
    ]
