"""Networks of the sizes of CoServe's: ResNet101 and YOLOv5 m and l, to be timed.

Their structure and number of weights are those of the published networks, with a gain
and a bias a channel in place of batch normalisation, which at inference is just that.
Weights are random: what they compute says nothing about an image.

Source: ResNet, arXiv 1512.03385, table 1; YOLOv5 6.0, whose `yolov5l.yaml` scaled by
width 0.75 and depth 0.67 is the m model. Differs: of YOLO's boxes only the best score
of each class comes out, because a request asks for one verdict.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_edge.core.checks import ConfigError, check_count
from moe_edge.papers.coserve.coe.board_nets import Judged, check_sides, most_likely
from moe_edge.papers.coserve.coe.layers import (
    Weights,
    conv,
    linear,
    max_pool,
    plain_conv,
)

BRANCH_GAIN = 0.2  # of fresh residual branches: else 33 of them add up to infinity
ANCHORS = 3
SCORES_OF_BOX = 5  # x, y, width, height, whether anything is there


@dataclasses.dataclass(frozen=True)
class Resnet101:
    """A classifier of 44.5 million weights.

    Attributes:
      classes: that the last layer tells apart; verdicts are the first ones.
      width: channels of the first stage's bottlenecks; blocks: of each stage.
    """

    classes: int = 1000
    width: int = 64
    blocks: Sequence[int] = (3, 4, 23, 3)

    def __post_init__(self):
        for name in ("classes", "width"):
            check_count(name, getattr(self, name))
        for count in self.blocks:
            check_count("blocks", count)

    def check(self, input_shape: Sequence[int], verdicts: Sequence[str]) -> None:
        """ConfigError: it can not judge such images so."""
        check_sides("resnet101", input_shape, 32)
        _check_classes("resnet101", self.classes, verdicts)

    def compute(self, w: Weights, x_NHWC: jax.Array, verdicts: Sequence[str]):
        """Logits, float32 [N, classes]."""
        relu = jax.nn.relu
        x_NHWC = conv(w, "stem", x_NHWC - 0.5, self.width, size=7, stride=2, act=relu)
        x_NHWC = max_pool(x_NHWC, 3, 2)
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                name, width = f"stage{stage}.{block}", self.width << stage
                stride = 2 if stage and not block else 1
                y = conv(w, f"{name}.a", x_NHWC, width, size=1, act=relu)
                y = conv(w, f"{name}.b", y, width, stride=stride, act=relu)
                y = conv(w, f"{name}.c", y, 4 * width, size=1, gain=BRANCH_GAIN)
                if not block:
                    skip = {"size": 1, "stride": stride}
                    x_NHWC = conv(w, f"{name}.skip", x_NHWC, 4 * width, **skip)
                x_NHWC = relu(x_NHWC + y)
        return linear(w, "head", x_NHWC.mean(axis=(1, 2)), self.classes)

    def judge(self, outputs_NO: np.ndarray, verdicts: Sequence[str]) -> list[Judged]:
        return most_likely(outputs_NO, verdicts)


@dataclasses.dataclass(frozen=True)
class Yolov5:
    """A detector: 46.5 million weights at width and depth 1.

    Attributes:
      width, depth: factors of channels and of bottlenecks a stage; m: 0.75, 0.67.
      classes: of what may be found; verdicts are the first ones.
    """

    width: float = 1.0
    depth: float = 1.0
    classes: int = 80

    def __post_init__(self):
        check_count("classes", self.classes)
        for name in ("width", "depth"):
            if not 0 < getattr(self, name) <= 2:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, expected above 0 and at most 2"
                )

    def check(self, input_shape: Sequence[int], verdicts: Sequence[str]) -> None:
        """ConfigError: it can not judge such images so."""
        check_sides("yolov5", input_shape, 32)
        _check_classes("yolov5", self.classes, verdicts)

    def compute(self, w: Weights, x_NHWC: jax.Array, verdicts: Sequence[str]):
        """The best score of each class anywhere, float32 [N, classes]."""
        c, n = self._channels, self._repeats
        x = _act(w, "stem", x_NHWC, c(64), 6, 2)
        kept = []
        for stage, repeats in enumerate((3, 6, 9, 3)):
            channels = c(128 << stage)
            x = _act(w, f"down{stage}", x, channels, 3, 2)
            x = _c3(w, f"c3_{stage}", x, channels, n(repeats))
            kept.append(x)
        x = _pyramid_pool(w, "sppf", x, c(1024))
        rising = []
        for step, (below, channels) in enumerate(((kept[2], 512), (kept[1], 256))):
            x = _act(w, f"up{step}", x, c(channels), 1, 1)
            rising.append(x)
            x = jnp.concatenate([_double(x), below], axis=-1)
            x = _c3(w, f"up{step}.c3", x, c(channels), n(3), shortcut=False)
        found = [x]
        for step, (across, channels) in enumerate(((rising[1], 256), (rising[0], 512))):
            x = _act(w, f"back{step}", x, c(channels), 3, 2)
            x = jnp.concatenate([x, across], axis=-1)
            x = _c3(w, f"back{step}.c3", x, c(2 * channels), n(3), shortcut=False)
            found.append(x)
        numbers = SCORES_OF_BOX + self.classes
        best = []
        for level, x in enumerate(found):
            boxes = plain_conv(w, f"detect{level}", x, ANCHORS * numbers)
            boxes = jax.nn.sigmoid(boxes.reshape(len(x), -1, numbers))
            best.append((boxes[..., 4:5] * boxes[..., SCORES_OF_BOX:]).max(axis=1))
        return jnp.stack(best).max(axis=0)

    def judge(self, outputs_NO: np.ndarray, verdicts: Sequence[str]) -> list[Judged]:
        return most_likely(outputs_NO, verdicts)

    def _channels(self, of_l: int) -> int:
        return 8 * math.ceil(of_l * self.width / 8)

    def _repeats(self, of_l: int) -> int:
        return max(round(of_l * self.depth), 1)


@dataclasses.dataclass(frozen=True)
class Yolov5m(Yolov5):
    """21.2 million weights."""

    width: float = 0.75
    depth: float = 0.67


@dataclasses.dataclass(frozen=True)
class Yolov5l(Yolov5):
    """46.5 million weights."""


def _act(w: Weights, name: str, x, out: int, size: int, stride: int, gain: float = 1.0):
    """A convolution and SiLU."""
    return conv(w, name, x, out, size, stride, jax.nn.silu, gain)


def _c3(w: Weights, name: str, x, out: int, repeats: int, shortcut: bool = True):
    """Half the channels through bottlenecks, the other half beside them."""
    half = out // 2
    y = _act(w, f"{name}.a", x, half, 1, 1)
    for block in range(repeats):
        z = _act(w, f"{name}.{block}.a", y, half, 1, 1)
        gain = BRANCH_GAIN if shortcut else 1.0
        z = _act(w, f"{name}.{block}.b", z, half, 3, 1, gain)
        y = y + z if shortcut else z
    beside = _act(w, f"{name}.b", x, half, 1, 1)
    return _act(w, f"{name}.c", jnp.concatenate([y, beside], axis=-1), out, 1, 1)


def _pyramid_pool(w: Weights, name: str, x, out: int):
    """Maxima of 5, 9 and 13 pixels, as three times 5."""
    x = _act(w, f"{name}.a", x, x.shape[-1] // 2, 1, 1)
    pooled = [x]
    for _ in range(3):
        pooled.append(max_pool(pooled[-1], 5, 1))
    return _act(w, f"{name}.b", jnp.concatenate(pooled, axis=-1), out, 1, 1)


def _double(x_NHWC: jax.Array) -> jax.Array:
    """Each pixel four times."""
    return jnp.repeat(jnp.repeat(x_NHWC, 2, axis=1), 2, axis=2)


def _check_classes(module: str, classes: int, verdicts: Sequence[str]) -> None:
    if classes < len(verdicts):
        raise ConfigError(
            f"{module} has {classes} classes for {len(verdicts)} outputs: "
            f"{', '.join(verdicts)}"
        )
