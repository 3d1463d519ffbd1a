"""Images of components: deterministic, and different where they should be."""

import itertools

import numpy as np
import pytest

from moe_edge.papers.coserve.workload.board import SHAPE, draw, look, poses
from moe_edge.papers.coserve.workload.coe_tasks import DEFECTS


def images(defect=None, count=12, first=0):
    return [{"seed": seed, "defect": defect} for seed in range(first, first + count)]


def test_draw_gives_the_same_image_alone_and_among_others():
    many = draw("component_7", images() + images("damaged"))
    assert many.shape == (24, *SHAPE) and many.dtype == np.float32
    assert 0 <= many.min() < many.max() <= 1
    for row, image in ((3, images()[3]), (15, images("damaged")[3])):
        np.testing.assert_array_equal(draw("component_7", [image])[0], many[row])


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("component", ["component_0", "component_5", "x"])
def test_defect_changes_an_image_more_than_a_draw_does(component, defect):
    """The same seed has the same noise and light: only the defect is left."""
    sound, other = draw(component, images()), draw(component, images(defect))
    changed = np.abs(sound - other).max(axis=-1) > 0.1
    assert (changed.mean(axis=(1, 2)) > 0.005).all()
    # What moves is the component, not the board round it.
    rim = np.ones(SHAPE[:2], bool)
    rim[1:-1, 1:-1] = False
    assert changed[:, rim].mean() < 0.2


def test_types_share_packages_and_fill_the_crop():
    looks = [look(f"component_{n}") for n in range(100)]
    assert len({one.half for one in looks}) == 6
    assert all(0.62 <= 2 * one.half[0] / SHAPE[0] <= 0.78 for one in looks)
    assert {tuple(one.variant.tolist()) for one in looks} == set(
        itertools.product([False, True], repeat=3)
    )
    means = {
        one.half: draw(f"component_{n}", images()).mean(axis=0)
        for n, one in enumerate(looks[:30])
    }
    for one, other in itertools.combinations(means.values(), 2):
        assert np.abs(one - other).mean() > 0.02


def test_misaligned_moves_the_body_and_wrong_polarity_turns_it():
    drawn = {d: draw("component_3", images(d, 40)) for d in (None, *DEFECTS)}
    one = look("component_3")
    # The body's middle stays body where it is turned; its marked end does not.
    end = int(15.5 - 0.74 * one.half[0])
    sound, turned = (drawn[d][:, 15:17, end].mean() for d in (None, "wrong_polarity"))
    assert abs(sound - turned) > 0.1
    spread = {d: drawn[d].std(axis=0).mean() for d in (None, "misaligned")}
    assert spread["misaligned"] > 1.5 * spread[None]


def test_poses_say_how_the_component_lies():
    drawn = {d: poses(images(d, 40)) for d in (None, *DEFECTS)}
    shift, turn = np.hypot(*drawn[None].T[:2]), np.rad2deg(np.abs(drawn[None][:, 2]))
    assert shift.max() < 1.14 and turn.max() < 3.01
    np.testing.assert_array_equal(drawn["damaged"], drawn[None])
    shift = np.hypot(*drawn["misaligned"].T[:2])
    turn = np.rad2deg(np.abs(drawn["misaligned"][:, 2]))
    assert ((shift > 1.86) | (turn > 10.9)).all() and (shift > 1.86).any()
    turned = np.rad2deg(drawn["wrong_polarity"][:, 2])
    assert (np.abs(turned - 180) < 3.01).all()


def test_damage_shows_on_every_type():
    for number in range(12):
        name = f"component_{number}"
        sound, hurt = draw(name, images()), draw(name, images("damaged"))
        assert (np.abs(hurt - sound).max(axis=(1, 2, 3)) > 0.15).all()


def test_damaged_components_may_be_sound_ones_of_another_variant():
    """Pixel by pixel, but for noise: who does not know the type cannot tell."""
    looks = {f"component_{n}": look(f"component_{n}") for n in range(60)}
    one = looks["component_3"]
    wrong = [s for s in range(400) if _chance(s, 6) >= 0.75]  # of its variant
    assert len(wrong) > 80
    for bit in range(3):
        others = [
            name
            for name, other in looks.items()
            if other.half == one.half
            and (other.variant ^ one.variant).tolist() == [b == bit for b in range(3)]
        ]
        seeds = [s for s in wrong if int(3 * _chance(s, 15)) == bit]
        shown = [{"seed": s, "defect": "damaged"} for s in seeds]
        sound = [{"seed": s, "defect": None} for s in seeds]
        assert seeds and others
        hurt = draw("component_3", shown)
        np.testing.assert_array_equal(hurt, draw(others[0], sound))


def _chance(seed, number):
    return np.random.default_rng(seed).random(20, np.float32)[number]
