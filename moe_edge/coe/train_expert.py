"""Trains one network on images that are drawn as they are needed.

AdamW with clipping and a rate that rises for a moment and falls to zero. A classifier
learns the verdict of an image, a detector shift and turn of the component. Every image
is new: training never repeats one, and none is that of a request (other seeds).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moe_edge.coe.board_options import Recipe
from moe_edge.coe.models import Network
from moe_edge.workload.board import draw, poses
from moe_edge.workload.coe_graph import OK
from moe_edge.workload.coe_tasks import DAMAGED, DEFECTS

FIRST_SEED = 2**32  # of images to train on; those of requests are below 2**31
HELD_OUT_SEED = 2**31  # of images that measure accuracy
HELD_OUT_IMAGES = 1024  # of an expert
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
    network: Network, parts: Sequence[Part], recipe: Recipe, seed: int
) -> dict[str, np.ndarray]:
    """Fresh weights, trained: float32 tensors by name.

    Args:
      parts: of the images, in equal shares.
      seed: of weights and images.
    """
    step, optimizer = _programs(network, recipe)
    arrays = jax.tree.map(jnp.asarray, network.init_arrays([seed, 1]))
    state = optimizer.init(arrays)
    for images, targets in _batches(network, parts, recipe, seed):
        arrays, state, _ = step(arrays, state, images, targets)
    return jax.tree.map(np.asarray, arrays)


def held_out(part: Part, count: int, seed: int) -> list[Image]:
    """Images of a component that nothing is trained on, shares as of the part."""
    return [
        {
            "seed": HELD_OUT_SEED + seed * count + n,
            "defect": part.defects[n % len(part.defects)],
        }
        for n in range(count)
    ]


def accuracy_of(
    network: Network, record_B: np.ndarray, parts: Sequence[Part], seed: int
) -> float:
    """Share of right verdicts of a record, on held-out images in equal shares."""
    right, words_W = [], network.words(record_B)
    for number, part in enumerate(parts):
        images = held_out(part, HELD_OUT_IMAGES // len(parts), seed + number)
        judged = network.judge(program(network)(words_W, draw(part.component, images)))
        for image, (verdict, _) in zip(images, judged, strict=True):
            right.append(verdict == wanted(network, image))
    return float(np.mean(right))


@functools.lru_cache(maxsize=8)
def program(network: Network) -> Callable:
    """`network.apply`, compiled once for each size of batch."""
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
                    "seed": int(rng.integers(FIRST_SEED, 2**62)),
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


@functools.lru_cache(maxsize=8)
def _programs(network: Network, recipe: Recipe):
    """The step of a network, compiled once for all experts, and its optimizer."""
    warmup = max(round(WARMUP_SHARE * recipe.steps), 1)
    rate = optax.warmup_cosine_decay_schedule(
        *(0.0, recipe.learning_rate, warmup, max(recipe.steps, warmup + 1))
    )
    kernels = {tensor.name: tensor.std > 0 for tensor in network.tensors}
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(rate, weight_decay=WEIGHT_DECAY, mask=kernels),
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(arrays, state, images_NHWC, targets):
        loss, grads = jax.value_and_grad(functools.partial(_loss, network))(
            arrays, images_NHWC, targets
        )
        updates, state = optimizer.update(grads, state, arrays)
        return optax.apply_updates(arrays, updates), state, loss

    return step, optimizer
