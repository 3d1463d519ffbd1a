"""Suite `devices` on a tiny model: what waits are compared with."""

import numpy as np
import pytest

from moe_edge.studies.speed import devices
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.mark.slow
def test_devices_hold_their_share_of_a_resident_model(tmp_path, monkeypatch):
    path, prompts = write_tiny_checkpoint(tmp_path / "tiny"), np.array([[3, 1, 4, 1]])
    monkeypatch.setattr(devices, "NUMBERS", (3,))
    (row,) = devices.shared_rows(path, prompts)
    assert row["case"] == "experts on 3 devices, one of them"
    assert row["ours"] < row["peer"] and row["limit_fraction"] == 1.0


@pytest.mark.slow
def test_homes_wait_for_the_busiest_link_and_compute_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "LINKS", 2)
    given = {"checkpoint": write_tiny_checkpoint(tmp_path / "tiny"), "share": 0.5}
    sizes = {"batches": (2,), "prompt_tokens": 9, "steps": 6, "repeats": 1}
    settings = devices.DevicesSettings(**given, **sizes)
    rows = {row["case"]: row for row in devices.devices_rows(settings, tmp_path)}
    assert [*rows] == [
        f"batch 2, {kind} homes, {phase}{bound}"
        for kind in ("free", "fixed")
        for phase in ("decode", "prompt")
        for bound in ("", ", bound")
    ]
    for case, row in rows.items():
        assert row["emulated"] and row["link"]["latency_s"] == 50e-6
        if case.endswith("bound"):
            # Decoding computes nothing meanwhile: whoever waits, waits as long.
            if "decode" in case:
                assert row["ours"] >= 0.95 * row["peer"] > 4
    # Two links take at least half as long as one for what it carries.
    ratios = [row["links_ratio"] for row in rows.values() if "links_ratio" in row]
    assert len(ratios) == 4 and 0.4 < min(ratios) < 0.9
    with pytest.raises(RuntimeError, match="free homes gave other logits"):
        devices.check_same("free", np.zeros(2), np.ones(2))
