"""Pruned checkpoints: what is left computes as it did, and shares stay shares."""

import dataclasses
import json

import numpy as np
import pytest

from moe_edge.convert.convert import convert_checkpoint, verify_checkpoint
from moe_edge.convert.open import check_unpruned, open_checkpoint
from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.engine.load import load_engine
from moe_edge.engine.resident import ResidentEngine
from moe_edge.engine.weights import load_weights
from moe_edge.evaluate.layerwise import LayerwiseText
from moe_edge.model.pruned import kept_experts, pruned_config
from moe_edge.model.sub_experts import split_config
from moe_edge.profile.reader import open_profile
from moe_edge.profile.run_profile import run_profile
from moe_edge.profile.run_prune import run_prune
from moe_edge.profile.saliency import frequency, keep_best, reap
from moe_edge.route.base import Route
from tests.support.layered import StoreReader
from tests.support.tiny_models import ALL, random_prompts


@pytest.fixture(scope="module")
def profile(tmp_path_factory, tiny, text):
    out = tmp_path_factory.mktemp("profile") / "p"
    run_profile(out_dir=str(out), checkpoint=str(tiny), text=text)
    return str(out)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory, tiny, profile):
    out = tmp_path_factory.mktemp("pruned") / "d"
    given = {"checkpoint": str(tiny), "profile": profile, "remove": 0.5}
    found = run_prune(out_dir=str(out), **given)
    assert found["experts"] == 4 and 0 < found["choices_lost"] < 0.5
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class OnlyKept(Route):
    """The K best of the kept experts, weighed by the scores of the whole router."""

    kept: dict[int, list[int]]
    name = "only_kept"
    SOURCE = "test"
    lossless = False

    def route(self, layer, scores_TE, resident_E, params, ids_TK, weights_TK):
        mask_E = np.full(scores_TE.shape[1], -np.inf, np.float32)
        mask_E[self.kept[layer]] = 0
        order_TE = np.argsort(-(scores_TE + mask_E), axis=1, kind="stable")
        ids_TK = order_TE[:, : ids_TK.shape[1]].astype(np.int32)
        return ids_TK, np.take_along_axis(scores_TE, ids_TK, axis=1)


def test_pruned_model_is_the_parent_that_chooses_among_what_is_left(tiny, pruned):
    """Weights are shares of a softmax over all experts, the removed ones too."""
    parent, child = (load_engine(path).engine for path in (tiny, pruned))
    listed = json.loads((pruned / "manifest.json").read_text())["pruned"]["kept"]
    kept = {int(layer): ids for layer, ids in listed.items()}
    tokens = np.array(random_prompts(parent.config, [16] * 4))
    wanted = LayerwiseText(parent, tokens).run(OnlyKept(kept))
    found = LayerwiseText(child, tokens).run()
    pairs = zip(found.forced.log_probs, wanted.forced.log_probs, strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    own = LayerwiseText(parent, tokens).run()
    lost = np.abs(np.subtract(found.forced.log_probs, own.forced.log_probs)).max()
    assert lost > 1e-3  # and not the parent itself
    total_T = found.trace.weights_TK.sum(axis=1)
    np.testing.assert_allclose(total_T, wanted.trace.weights_TK.sum(axis=1), rtol=1e-5)
    assert child.config.moe.removed_experts == 4


def test_offloaded_pruned_model_gives_the_resident_bits(pruned):
    prompt = [[5, 9, 11, 3]]
    resident = load_engine(pruned).engine
    session = resident.new_session(1, 8)
    wanted = np.asarray(resident.prefill(session, prompt))
    with load_engine(pruned, offload="50%").engine as engine:
        found = np.asarray(engine.prefill(engine.new_session(1, 8), prompt))
    np.testing.assert_array_equal(found, wanted)


def test_reap_is_the_mean_of_gate_times_norm(tiny, profile):
    reader, opened = open_checkpoint(tiny), open_profile(profile)
    found_LE = reap(reader, opened)
    layer, expert = opened.layers[1], int(np.argmax(found_LE[1]))
    down = reader.layout.part(reader.experts(layer)[expert], "down")
    norms = [
        weight * np.linalg.norm(row.astype(np.float32) @ down.T)
        for row, weight in zip(
            opened.activations(layer, expert),
            opened.gate_weights(layer, expert),
            strict=True,
        )
    ]
    assert found_LE[1, expert] == pytest.approx(np.mean(norms), rel=1e-5)
    counts_E = opened.counts_NLE[:, 0].sum(axis=0)
    np.testing.assert_allclose(frequency(opened)[0], counts_E / counts_E.sum())
    assert keep_best(np.array([[1.0, 3, 1, 2]]), [7], 3) == {7: [0, 1, 3]}


def test_normalised_weights_need_no_removed_rows():
    """Where weights add up over the chosen, the rows of removed experts are gone."""
    moe = dataclasses.replace(ALL["gqa"].moe, norm_topk=True)
    parent = dataclasses.replace(ALL["gqa"], moe=moe)
    kept = {layer: [0, 2, 3, 5, 7] for layer in parent.moe_layers}
    assert pruned_config(parent, kept).moe.removed_experts == 0
    assert pruned_config(ALL["gqa"], kept).moe.removed_experts == 7
    reader = StoreReader(pruned_config(ALL["gqa"], kept))
    names = ResidentEngine(load_weights(reader)).weights.layers[1]
    assert names["router.removed_weight"].shape == (7, 40)


def test_conversion_keeps_what_was_pruned_and_hf_is_refused(pruned, tmp_path):
    convert_checkpoint(pruned, tmp_path / "b", dtype="bfloat16", progress=False)
    again = open_checkpoint(tmp_path / "b")
    assert again.config.moe.num_experts == 4 and again.config.moe.removed_experts == 4
    assert verify_checkpoint(pruned)
    with pytest.raises(CheckpointError, match="is pruned, and Hugging Face has no"):
        convert_checkpoint(pruned, tmp_path / "h", to="hf", progress=False)


def test_prune_rejects_what_cannot_be(tiny, profile, pruned, tmp_path):
    given = {"out_dir": str(tmp_path / "x"), "profile": profile}
    for remove, words in (
        (1.0, r"remove is 1.0, expected a share"),
        (0.001, r"0.001 of 8 experts is none"),
        (0.9, r"1 experts a layer are left and a token takes 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_prune(checkpoint=str(tiny), remove=remove, **given)
    with pytest.raises(ConfigError, match="d is pruned, and pruning takes the check"):
        run_prune(checkpoint=str(pruned), **given)
    with pytest.raises(ConfigError, match="is pruned, and refactoring takes the check"):
        check_unpruned(open_checkpoint(pruned), "refactoring")
    split = split_config(ALL["gqa"], 2)
    with pytest.raises(ConfigError, match="refactored, into 2 sub-experts an expert"):
        pruned_config(split, {1: [0, 1, 2]})
    with pytest.raises(ConfigError, match="unknown rule 'luck'"):
        run_prune(checkpoint=str(tiny), by="luck", **given)
    groups = dataclasses.replace(ALL["gqa"].moe, num_groups=4, topk_groups=2)
    with pytest.raises(ConfigError, match="routed by 4 groups of experts"):
        pruned_config(dataclasses.replace(ALL["gqa"], moe=groups), {1: [0, 1, 2]})


def test_manifest_that_keeps_other_experts_is_refused(pruned):
    config = open_checkpoint(pruned).parent_config
    for listed in ({}, {"0": [0, 1]}, {"0": [0, 8], "1": [0, 1]}, {"0": 3, "1": 3}):
        with pytest.raises(ConfigError, match=r"expected for each of layers \[0, 1\]"):
            kept_experts(config, listed)
    path = pruned / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["pruned"]["kept"]["0"][0] = 99
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="pruned of the manifest: kept names"):
        open_checkpoint(pruned)
