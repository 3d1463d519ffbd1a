"""Images of components: deterministic, and different where they should be."""

import numpy as np
import pytest

from moe_edge.workload.board import SHAPE, draw, look, poses
from moe_edge.workload.coe_tasks import DEFECTS


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


def test_types_look_different_and_fill_the_crop():
    looks = [look(f"component_{n}") for n in range(50)]
    assert len({one.half for one in looks}) == 50
    assert all(0.62 <= 2 * one.half[0] / SHAPE[0] <= 0.78 for one in looks)
    means = np.stack([draw(f"component_{n}", images()).mean(axis=0) for n in range(5)])
    apart = np.abs(means[:, None] - means[None]).mean(axis=(2, 3, 4))
    assert apart[~np.eye(5, dtype=bool)].min() > 0.02


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


def test_types_have_marks_that_others_lack():
    looks = [look(f"component_{n}") for n in range(60)]
    for mark in ("spot", "notch", "groove"):
        has = [getattr(one, mark) is not None for one in looks]
        assert 0.3 < np.mean(has) < 0.7
    packages = {(one.pins, one.upright, round(one.half[0])) for one in looks}
    assert len(packages) <= 6  # the rest of a look tells them apart


def test_damage_shows_on_every_type():
    for number in range(12):
        name = f"component_{number}"
        sound, hurt = draw(name, images()), draw(name, images("damaged"))
        assert (np.abs(hurt - sound).max(axis=(1, 2, 3)) > 0.15).all()
