"""Words and checks of figure 3's entry follow from the numbers."""

import numpy as np

from moe_edge.studies.moe_prism.fig3_entry import SPARSER, checks_of, explain
from moe_edge.studies.moe_prism.sparsity import gated_noise, measure

NEURONS = 16


def measured(rows_TF):
    return measure(rows_TF, np.ones(NEURONS))


def test_words_follow_from_the_numbers():
    wide = explain(np.array([1.0, 4.0]), 2.31)
    assert "2.31, 1% off the paper's: the ratio alone is no proof" in wide
    assert "have 2.50 on average and differ more among themselves" in wide
    assert "(standard deviation 1.50) than that from the paper's (0.16)" in wide
    narrow = explain(np.array([5.0, 5.2]), 3.5)
    assert "3.50, 49% off the paper's. Experts" in narrow
    assert "differ less among themselves (standard deviation 0.10)" in narrow


def test_check_fails_for_experts_that_learned_nothing():
    noise_TF = gated_noise(NEURONS)
    noise, sparse = measured(noise_TF), measured(noise_TF**3)
    even = measured(np.sign(noise_TF))
    assert checks_of({(0, 0): sparse, (1, 0): sparse}, noise) == {SPARSER: True}
    for other in (noise, even):
        # Another layer does not make up for it, another expert of the layer may.
        assert checks_of({(0, 0): sparse, (1, 0): other}, noise) == {SPARSER: False}
    assert checks_of({(0, 0): sparse, (0, 1): noise}, noise) == {SPARSER: True}
