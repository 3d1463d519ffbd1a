"""Blocks of a server onto its GPUs."""

import numpy as np
import pytest

from moe_edge.place.pack import pack, quotas, served_load
from tests.place.support import frequencies, unequal_slots


@pytest.mark.parametrize("seed", range(6))
def test_quotas_rows_are_counts_and_columns_stay_within_slots(seed):
    rng = np.random.default_rng(seed)
    count_L = rng.integers(0, 20, 7)
    slots_G = rng.multinomial(count_L.sum() + (seed % 2) * 5, [0.6, 0.05, 0.35])
    quota_LG = quotas(count_L, slots_G)
    assert (quota_LG.sum(axis=1) == count_L).all()
    assert (quota_LG.sum(axis=0) <= slots_G).all()
    assert (quota_LG >= 0).all()


def test_pack_spreads_every_layer_and_balances_its_load():
    load_NLE = np.array([[[8.0, 7.0, 2.0, 1.0], [1.0, 1.0, 5.0, 5.0]]])
    on_NLE = np.ones_like(load_NLE, bool)
    gpu_LE = pack(on_NLE, [np.array([4, 4])], load_NLE)[0]
    for layer in range(2):
        load_G = np.bincount(gpu_LE[layer], load_NLE[0, layer])
        assert load_G.max() == load_NLE[0, layer].sum() / 2


def test_pack_faster_gpu_takes_the_heavy_block():
    load_NLE = np.array([[[9.0, 1.0]]])
    on_NLE = np.ones_like(load_NLE, bool)
    slots, speeds = [np.array([1, 1])], [np.array([1.0, 4.0])]
    assert pack(on_NLE, slots, load_NLE, speeds)[0, 0].tolist() == [1, 0]


@pytest.mark.parametrize("seed", range(4))
def test_pack_keeps_the_choice_and_every_gpu_within_its_slots(seed):
    rng = np.random.default_rng(seed)
    slots = unequal_slots(4, 5 * 16, 2.0, seed, gpus=(1, 3, 2))
    frequency_NLE = frequencies(4, 5, 16, seed)
    on_NLE = np.zeros(frequency_NLE.shape, bool)
    for on_LE, slots_G in zip(on_NLE, slots, strict=True):
        count = min(slots_G.sum(), 80)
        on_LE.flat[rng.choice(80, count, replace=False)] = True
    gpu_NLE = pack(on_NLE, slots, served_load(frequency_NLE, on_NLE))
    assert ((gpu_NLE >= 0) == on_NLE).all()
    for gpu_LE, slots_G in zip(gpu_NLE, slots, strict=True):
        used_G = np.bincount(gpu_LE[gpu_LE >= 0], minlength=len(slots_G))
        assert (used_G <= slots_G).all()


def test_served_load_conserves_calls_and_shares_remote_ones():
    frequency_NLE = np.array([[[0.6, 0.4]], [[0.2, 0.8]], [[0.5, 0.5]]])
    on_NLE = np.array([[[True, False]], [[True, True]], [[False, False]]])
    load_NLE = served_load(frequency_NLE, on_NLE)
    np.testing.assert_allclose(load_NLE[:, 0], [[0.85, 0], [0.45, 1.7], [0, 0]])
    assert load_NLE.sum() == pytest.approx(frequency_NLE.sum())
