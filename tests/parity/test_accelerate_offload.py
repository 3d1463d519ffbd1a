"""The suite's peer with layers on disk, as the suite runs it (extra `parity`)."""

import pytest

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.studies.speed import models, offload_accelerate

pytest.importorskip("accelerate")
pytest.importorskip("torch")

pytestmark = pytest.mark.parity


def test_both_decode_with_three_of_four_layers_on_disk(tmp_path):
    config = models.olmoe_config(4, "bfloat16", hidden=64, heads=4, experts=8)
    folder = models.write_random(tmp_path / "tiny", config)
    convert_checkpoint(folder, tmp_path / "ours", progress=False)
    (row,) = offload_accelerate.accelerate_rows(folder, tmp_path / "ours", 1)
    assert row["peer"] > 0 and row["ours"] > 0
