"""Drawn components: the same each time, and defects that can be seen."""

import numpy as np
import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.workload.board import SIZE, draw, look_of
from moe_edge.workload.coe_tasks import DEFECTS

SEEDS = list(range(40))


def test_picture_depends_on_its_type_seed_and_defect_alone():
    look = look_of("component_7")
    seeds, defects = [3, 1, 4], [None, "damaged", "misaligned"]
    together = draw(look, seeds, defects)
    assert together.shape == (3, SIZE, SIZE, 3) and together.dtype == np.float32
    assert together.min() >= 0 and together.max() <= 1
    for n, (seed, defect) in enumerate(zip(seeds, defects, strict=True)):
        alone = draw(look_of("component_7"), [seed], [defect])
        np.testing.assert_array_equal(alone[0], together[n])
    other = draw(look_of("component_8"), [3], [None])
    assert np.abs(other[0] - together[0]).mean() > 0.03


@pytest.mark.parametrize("component", ["component_0", "component_1", "R17", "U4"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_changes_a_picture_beyond_its_noise(component, defect):
    look = look_of(component)
    sound = draw(look, SEEDS, [None] * len(SEEDS))
    other = draw(look, SEEDS, [defect] * len(SEEDS))
    changed = (np.abs(sound - other).max(axis=-1) > 0.12).mean(axis=(1, 2))
    assert changed.min() > 0.01  # in every picture ten pixels at least


def test_pictures_of_a_type_differ_less_than_types():
    within, means = [], []
    for number in range(12):
        pictures = draw(look_of(f"component_{number}"), SEEDS, [None] * len(SEEDS))
        means.append(pictures.mean(axis=0))
        within.append(np.abs(pictures - means[-1]).mean())
    between = np.abs(np.stack(means) - np.mean(means, axis=0)).mean()
    assert np.mean(within) > 0.02 and between > 1.5 * np.mean(within)


def test_component_fills_the_picture_as_a_tight_crop_does():
    for number in range(50):
        look = look_of(f"component_{number}")
        assert 0.6 <= look.half_x <= 0.8 and look.half_y <= look.half_x
        assert look.corner <= look.half_y


def test_wrong_pictures_are_refused():
    look = look_of("a")
    with pytest.raises(ConfigError, match="unknown defect 'burnt'; known: dam"):
        draw(look, [0], ["burnt"])
    with pytest.raises(ConfigError, match="size must be a positive whole numbe"):
        draw(look, [0], [None], size=0)
