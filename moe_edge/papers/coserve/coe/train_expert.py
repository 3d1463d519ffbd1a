"""Trains one network on images that are drawn as they are needed.

AdamW with clipping and a rate that rises for a moment and falls to zero. A classifier
learns the verdict of an image, a detector shift and turn of the component. Every image
is new: training never repeats one, and none is that of a request (other seeds).
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moe_edge.papers.coserve.coe.board_options import Recipe
from moe_edge.papers.coserve.coe.models import Network
from moe_edge.papers.coserve.workload.board import draw, poses
from moe_edge.papers.coserve.workload.coe_graph import OK
from moe_edge.papers.coserve.workload.coe_tasks import DAMAGED, DEFECTS

FIRST_SEED = 2**62  # of images to train on; those of requests are below 2**31
HELD_OUT_SEED = 2**32  # of images that measure accuracy
HELD_OUT_IMAGES = 1024  # of an expert
BATCH = 128  # of images to be judged
CHUNK_STEPS = 16  # whose images are drawn at once, type by type
WARMUP_SHARE = 0.05
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
PIXEL = 0.25  # what an error of a pixel weighs beside one of a cosine

Image = Mapping[str, Any]


class Part(NamedTuple):
    """Images of a component, with as many of each defect as it is named."""

    component: str
    defects: Sequence[str | None]


def classifier_part(component: str, followed: bool) -> Part:
    """What a classifier sees: half is damaged.

    Args:
      followed: by a detector, so that what lies wrong is to pass it.
    """
    sound = (None, None, None, None)
    if followed:
        sound = (None, None, *DEFECTS[1:])
    return Part(component, (*sound, *[DAMAGED] * 4))


def detector_part(component: str) -> Part:
    """What a detector sees: a third of each."""
    return Part(component, (None, *DEFECTS[1:]))


def train_network(
    network: Network,
    parts: Sequence[Part],
    recipe: Recipe,
    seed: int,
    count: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Fresh weights, trained: float32 tensors by name.

    Args:
      parts: of the images, in equal shares.
      seed: of weights and images.
      count: called after each step.
    """
    step, optimizer = _programs(network)
    drawn = network.init_arrays([seed, 1])
    values_W = jnp.asarray(np.concatenate([one.reshape(-1) for one in drawn.values()]))
    state = optimizer.init(values_W)
    for number, batch in enumerate(_batches(network, parts, recipe, seed)):
        rate = np.float32(_rate(recipe, number))
        values_W, state = step(values_W, state, *batch, rate)
        count()
    return _split(network, np.asarray(values_W))


def held_out(part: Part, count: int, seed: int) -> list[Image]:
    """Images of a component that nothing is trained on, shares as of the part."""
    return [
        {
            "seed": HELD_OUT_SEED + seed * HELD_OUT_IMAGES + n,
            "defect": part.defects[n % len(part.defects)],
        }
        for n in range(count)
    ]


def accuracy_of(
    network: Network, record_B: np.ndarray, parts: Sequence[Part], seed: int
) -> float:
    """Share of right verdicts of a record, on held-out images in equal shares."""
    right = []
    for number, part in enumerate(parts):
        images = held_out(part, HELD_OUT_IMAGES // len(parts), seed + number)
        verdicts = verdicts_of(network, record_B, draw(part.component, images))
        for image, verdict in zip(images, verdicts, strict=True):
            right.append(verdict == wanted(network, image))
    return float(np.mean(right))


def verdicts_of(
    network: Network, record_B: np.ndarray, images_NHWC: np.ndarray
) -> list[str]:
    """A verdict an image; one size of batch, so that one program is compiled."""
    words_W, verdicts = network.words(record_B), []
    for first in range(0, len(images_NHWC), BATCH):
        batch = images_NHWC[first : first + BATCH]
        room = np.zeros((BATCH, *batch.shape[1:]), np.float32)
        room[: len(batch)] = batch
        outputs_NO = np.asarray(_program(network)(words_W, room))[: len(batch)]
        verdicts += [verdict for verdict, _ in network.judge(outputs_NO)]
    return verdicts


@functools.lru_cache(maxsize=8)
def _program(network: Network) -> Callable:
    return jax.jit(network.apply)


def wanted(network: Network, image: Image) -> str:
    """The verdict that a network should give: a defect that it cannot name is OK."""
    defect = image["defect"] or OK
    return defect if defect in network.verdicts else OK


def targets_of(network: Network, images: Sequence[Image]) -> np.ndarray:
    """What a network learns of images: number of a verdict, or four of a pose."""
    if _learns_pose(network):
        x_N, y_N, turn_N = poses(images).T
        return np.stack([x_N, y_N, np.cos(turn_N), np.sin(turn_N)], axis=1)
    return np.array([network.verdicts.index(wanted(network, one)) for one in images])


def _learns_pose(network: Network) -> bool:
    return network.module == "board_detector"


def _batches(
    network: Network, parts: Sequence[Part], recipe: Recipe, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Images and targets of each step."""
    rng = np.random.default_rng([seed, 2])
    left = recipe.steps
    while left:
        steps = min(left, max(CHUNK_STEPS, len(parts)))
        count = steps * recipe.batch
        of_N = np.resize(rng.permutation(len(parts)), count)
        images_NHWC, targets = [], []
        for number, part in enumerate(parts):
            images = [
                {
                    "seed": int(rng.integers(FIRST_SEED, 2**63 - 1)),
                    "defect": part.defects[rng.integers(len(part.defects))],
                }
                for _ in range(int((of_N == number).sum()))
            ]
            if images:
                images_NHWC.append(draw(part.component, images))
                targets.append(targets_of(network, images))
        images_NHWC, targets = np.concatenate(images_NHWC), np.concatenate(targets)
        for rows in rng.permutation(count).reshape(steps, recipe.batch):
            yield images_NHWC[rows], targets[rows]
        left -= steps


def _loss(network: Network, arrays, images_NHWC, targets) -> jax.Array:
    outputs_NO = network.apply_arrays(arrays, images_NHWC)
    if not _learns_pose(network):
        loss_N = optax.softmax_cross_entropy_with_integer_labels
        return loss_N(outputs_NO, targets).mean()
    weight_O = jnp.array([PIXEL, PIXEL, 1.0, 1.0])[None]
    return optax.huber_loss(outputs_NO * weight_O, targets * weight_O, delta=0.5).mean()


def _rate(recipe: Recipe, step: int) -> float:
    """Of learning: it rises for the first steps, then falls as a cosine does."""
    warmup = max(round(WARMUP_SHARE * recipe.steps), 1)
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    share = (step - warmup) / max(recipe.steps - warmup, 1)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * share))


@functools.lru_cache(maxsize=8)
def _programs(network: Network):
    """The step of a network, compiled once for all experts, and its optimizer."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.scale_by_adam(),
        optax.add_decayed_weights(WEIGHT_DECAY),
    )
    loss = functools.partial(_loss, network)

    # One vector for the optimizer: thirty tensors take longer to compile and to step.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(values_W, state, images_NHWC, targets, rate):
        grads = jax.grad(loss)(_split(network, values_W), images_NHWC, targets)
        grads_W = jnp.concatenate([grads[t.name].reshape(-1) for t in network.tensors])
        with jax.numpy_dtype_promotion("standard"):  # optax mixes float and int
            updates_W, state = optimizer.update(grads_W, state, values_W)
        return values_W - rate * updates_W, state

    return step, optimizer


def _split(network: Network, values_W: Any) -> dict[str, Any]:
    """Tensors by name of all values in the order of a record."""
    found, first = {}, 0
    for tensor in network.tensors:
        part = values_W[first : first + tensor.size]
        found[tensor.name], first = part.reshape(tensor.shape), first + tensor.size
    return found
