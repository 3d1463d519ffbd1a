"""From checkpoint and profile to a refactored checkpoint, and what is refused."""

import dataclasses
import errno
import json
import shutil
from unittest import mock

import jax
import numpy as np
import pytest

from moe_edge.checkpoint.manifest import REPORT_NAME, read_manifest
from moe_edge.convert.open import open_checkpoint
from moe_edge.core.checks import ConfigError, OutputError
from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.papers.moe_prism.refactor import measure, run
from moe_edge.papers.moe_prism.refactor.build import build_refactoring
from moe_edge.papers.moe_prism.refactor.finetune import train
from moe_edge.papers.moe_prism.refactor.gates.linear import sub_norms
from moe_edge.papers.moe_prism.refactor.partition.problem import split_rows
from moe_edge.papers.moe_prism.refactor.run import run_refactor
from moe_edge.papers.moe_prism.refactor.settings import Settings
from moe_edge.profile.reader import open_profile
from moe_edge.profile.run_profile import run_profile
from tests.support.tiny_models import score_all

pytestmark = pytest.mark.slow  # whole runs: minutes of compilation

U, TOP_K = 4, 2


@pytest.fixture(scope="module")
def cg(tiny, profile, text, tmp_path_factory):
    """A model refactored with a proxy gate, and the summary."""
    out = tmp_path_factory.mktemp("cg") / "r"
    summary = run_refactor(
        out_dir=str(out),
        checkpoint=str(tiny),
        profile=profile,
        gate="cg",
        text=text,
        max_text_tokens=200,
        ppl_k="1,4,8",
        config_text=lambda: "# settings\n",
    )
    return out, summary


def refactor(tiny, profile, out, **options):
    arguments = {"checkpoint": str(tiny), "profile": profile, "ppl_k": ""} | options
    return run_refactor(out_dir=str(out), **arguments)


def test_folder_and_report(cg, tiny):
    out, summary = cg
    assert summary["identity_error"] <= 1e-5
    assert sorted(summary["ppl_by_k"]) == [1, 4, 8]
    assert summary["out_dir"] == str(out)
    report = json.loads((out / REPORT_NAME).read_text())
    assert (out / "config.gin").read_text() == "# settings\n"
    assert not out.with_name("r.partition").exists()
    # All sub-experts of all the parent's experts are the parent.
    parents, ours = report["parent_ppl_by_k"], report["ppl_by_k"]
    assert sorted(parents) == ["4", "8"]
    assert ours["8"] == pytest.approx(parents["8"], rel=1e-5)
    assert ours["1"] != pytest.approx(ours["8"], rel=1e-5)
    assert report["shares"]["heldout"]["partition"] < 0.75
    assert report["objective"] == summary["objective"] > 0
    manifest = read_manifest(out)
    parent_hash = open_checkpoint(tiny).content_sha256()
    assert manifest["refactor"]["parent_sha256"] == parent_hash
    assert manifest["refactor"]["gate"] == "proxy_global"
    assert manifest["refactor"]["gate_neurons"] == 1
    assert manifest["refactor"]["inactive"] == 3


@pytest.fixture(scope="module")
def calibrated(tiny, text, tmp_path_factory):
    """A model refactored with a calibrated gate, its profile, and the summary."""
    folder = tmp_path_factory.mktemp("calibrated")
    profiled = {"text": text, "checkpoint": str(tiny), "window": 64, "hidden": True}
    run_profile(out_dir=str(folder / "p"), **profiled)
    options = {"gate": "calibrated", "text": text, "ppl_k": "1,4,8"}
    summary = refactor(tiny, str(folder / "p"), folder / "r", **options)
    return folder / "r", folder / "p", summary


def test_calibrated_gate_is_the_parent_at_full_k_and_predicts_norms(calibrated, tiny):
    out, profiled, summary = calibrated
    assert summary["identity_error"] <= 1e-5
    assert sorted(summary["ppl_by_k"]) == [1, 4, 8]
    assert read_manifest(out)["refactor"]["gate"] == "calibrated"
    reader, opened = open_checkpoint(out), open_profile(profiled)
    dense = reader.dense(1)
    weight_EUD = dense["router.level_weight"].astype(np.float32).reshape(8, U, -1)
    bias_EU = dense["router.level_bias"].reshape(8, U)
    gains = []
    fitted = np.flatnonzero(weight_EUD.any(axis=(1, 2)))  # others had too few tokens
    assert len(fitted) > 2
    for expert in fitted:
        blocks = reader.experts(1)[expert * U : (expert + 1) * U]
        gate, up, down = (
            reader.layout.part(blocks, name).astype(np.float32)
            for name in ("gate", "up", "down")
        )
        x_TD = opened.hidden(1, expert).astype(np.float32)
        gate_TUf = np.einsum("td,ufd->tuf", x_TD, gate)
        act_TUf = gate_TUf / (1 + np.exp(-gate_TUf))
        act_TUf *= np.einsum("td,ufd->tuf", x_TD, up)
        norms_TU = np.einsum(
            "tuf,uf->tu", np.abs(act_TUf), np.linalg.norm(down, axis=1)
        )
        levels_TU = np.exp(x_TD @ weight_EUD[expert].T + bias_EU[expert])
        rows = np.arange(len(x_TD))
        by_level = norms_TU[rows, levels_TU.argmax(axis=1)].sum()
        gains.append(by_level / norms_TU.sum(axis=0).max())
    # One block a token, chosen by the rows, has more than the best fixed one.
    assert np.mean(gains) > 1.05, gains


def test_calibrated_ft_changes_the_rows_that_choose_and_nothing_else(
    calibrated, tiny, text, tmp_path
):
    out, profiled, _ = calibrated
    options = {"tokens": 512, "batch_tokens": 128, "window": 64, "accumulate": 1}
    options |= {"held_out_rows": 2, "learning_rate": 3e-2, "k_stages": 2}
    summary = refactor(
        *(tiny, str(profiled), tmp_path / "ft"),
        gate="calibrated_ft",
        train_text=text,
        teacher_kl=True,
        fine_tuning=options,
        text=text,
        ppl_k="8",
    )
    assert summary["identity_error"] <= 1e-5
    tuned, plain = open_checkpoint(tmp_path / "ft"), open_checkpoint(out)
    np.testing.assert_array_equal(tuned.experts(1), plain.experts(1))
    before, after = plain.dense(1), tuned.dense(1)
    changed = [n for n in before if not np.array_equal(before[n], after[n])]
    assert sorted(changed) == ["router.level_bias", "router.level_weight"]
    report = json.loads((tmp_path / "ft" / REPORT_NAME).read_text())["fine_tuning"]
    assert report["k_values"][-1] == 7  # with all 8 there is nothing to choose


@pytest.mark.parametrize("made", ["cg", "calibrated"])
def test_offloaded_is_resident_bit_for_bit(made, request):
    out = request.getfixturevalue(made)[0]
    prompts = [np.random.default_rng(1).integers(0, 320, n).tolist() for n in (9, 5)]

    def decoded(k, offload):
        engine = load_engine(out, with_tokenizer=False, k=k, offload=offload).engine
        with engine:
            session = engine.new_session(2, 32)
            rows = [engine.prefill(session, prompts)]
            for step in range(4):
                tokens = jax.device_put(np.array([step + 1, step + 7], np.int32))
                active = jax.device_put(np.array([True, step < 2]))
                rows.append(engine.decode(session, tokens, active))
            return np.stack(jax.device_get(rows))

    for k, budget in ((8, f"{100 * 2 / 64}%"), (3, "25%")):
        offload = OffloadOptions(device_memory=budget)
        np.testing.assert_array_equal(decoded(k, offload), decoded(k, None))


def test_linear_gate_at_each_multiple_is_the_parent(tiny, profile, tmp_path):
    summary = refactor(tiny, profile, tmp_path / "r")
    assert summary["ppl_by_k"] == {} and summary["identity_error"] <= 1e-5
    ids = np.random.default_rng(2).integers(0, 320, 70).tolist()

    def logits(folder, k):
        engine = load_engine(folder, with_tokenizer=False, k=k).engine
        return score_all(engine, [ids])[0]

    fewer, expected = logits(tmp_path / "r", U), logits(tiny, 1)
    assert np.abs(fewer - expected).max() <= 1e-5 * expected.std()


def test_same_seed_same_model(tiny, profile, tmp_path):
    for name in ("a", "b"):
        refactor(tiny, profile, tmp_path / name, gate="cg", proxy_rule="pattern")
    digests = [read_manifest(tmp_path / n)["content_sha256"] for n in ("a", "b")]
    assert digests[0] == digests[1]
    refactor(tiny, profile, tmp_path / "c", solver="random", seed=5)
    assert read_manifest(tmp_path / "c")["content_sha256"] != digests[0]


def test_blocks_are_ordered_by_importance(tiny, profile, tmp_path):
    reader, opened = open_checkpoint(tiny), open_profile(profile)
    settings = Settings(gate="cg", gate_neurons=4, heldout_ratio=0.0)
    found, _ = build_refactoring(reader, opened, settings, tmp_path / "work")
    down = reader.layout.part(reader.experts(1), "down").astype(np.float32)
    expert = int(np.argmax([opened.tokens_of(1, e) for e in range(8)]))
    rows, weights = opened.activations(1, expert), opened.gate_weights(1, expert)
    norms_F = np.linalg.norm(down[expert], axis=0)
    norms_TU = sub_norms(rows, found.labels[1][expert], U, norms_F)
    assert (np.diff(weights @ norms_TU) <= 0).all()
    # With all of its neurons as gate neurons a block is judged exactly.
    judges = type(found.judges[1])(*(array[expert] for array in found.judges[1]))
    np.testing.assert_allclose(judges.levels(rows), norms_TU, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("choice", ["fitted", "central"])
def test_priors_are_in_the_unit_of_levels(choice, tiny, profile, tmp_path):
    opened = open_profile(profile)
    kept = [len(opened.activations(0, expert)) for expert in range(8)]
    limit = sorted(int(0.8 * n) for n in kept)[4]
    settings = Settings(gate="cg", gate_choice=choice, min_tokens=limit)
    reader = open_checkpoint(tiny)
    found, _ = build_refactoring(reader, opened, settings, tmp_path / "work")
    judges = found.judges[0]
    poor = ~judges.scale_Ur.any(axis=(1, 2))
    assert 0 < poor.sum() < 8
    means = []
    for expert in np.flatnonzero(~poor):
        rows = opened.activations(0, expert)
        fit, _ = split_rows(len(rows), settings.heldout_ratio, settings.seed)
        one = type(judges)(*(array[expert] for array in judges))
        means.append(one.levels(rows[fit]).mean(axis=0))
    expected = np.mean(means, axis=0)
    np.testing.assert_allclose(judges.prior_U[poor][0], expected, rtol=1e-4)


def test_few_tokens_are_counted_and_get_a_prior(tiny, profile, tmp_path):
    opened = open_profile(profile)
    kept = [len(opened.activations(0, expert)) for expert in range(8)]
    limit = sorted(int(0.8 * n) for n in kept)[4]
    refactor(tiny, profile, tmp_path / "r", gate="cg", min_tokens=limit)
    report = json.loads((tmp_path / "r" / REPORT_NAME).read_text())
    assert 0 < report["rules"]["solved"] < 16
    assert sum(report["rules"].values()) == 16
    assert report["identity_error"] <= 1e-5
    dense = open_checkpoint(tmp_path / "r").dense(0)
    scale = dense["router.proxy_scale"].reshape(8, -1)
    prior = dense["router.proxy_prior"].reshape(8, U)
    poor = ~scale.any(axis=1)
    assert poor.any() and not poor.all()
    assert (prior[poor] > 0).all() and (prior[poor] == prior[poor][0]).all()


def test_lg_ft_changes_router_rows_only(tiny, profile, text, tmp_path):
    options = {"tokens": 512, "batch_tokens": 128, "window": 64, "k_stages": 2}
    options |= {"accumulate": 1, "held_out_rows": 1, "learning_rate": 1e-2}
    refactor(
        *(tiny, profile, tmp_path / "ft"),
        gate="lg_ft",
        train_text=text,
        fine_tuning=options,
    )
    refactor(tiny, profile, tmp_path / "lg", solver="alternate")
    tuned, plain = (open_checkpoint(tmp_path / name) for name in ("ft", "lg"))
    np.testing.assert_array_equal(tuned.experts(1), plain.experts(1))
    before, after = plain.dense(1), tuned.dense(1)
    changed = [n for n in before if not np.array_equal(before[n], after[n])]
    assert changed == ["router.weight"]
    assert tuned.manifest["refactor"]["fine_tuned"]
    assert "fine_tuning" in json.loads((tmp_path / "ft" / REPORT_NAME).read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"ft", "lg"}


def test_a_killed_lg_ft_leaves_nothing_that_the_next_does_not_take(
    tiny, profile, text, tmp_path, monkeypatch, capsys
):
    """Killed while it trains, paused, then killed while it is measured."""
    options = {"gate": "lg_ft", "train_text": text}
    options["fine_tuning"] = {"tokens": 64, "batch_tokens": 64, "window": 64}

    def killed(reader, *args):
        shutil.copytree(reader.path, tmp_path / "copy")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "finetune_router", killed)
        refactor(tiny, profile, tmp_path / "ft", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "ft.partition"}
    kept = f"unfinished work is kept in {tmp_path / 'ft.partition'}"
    assert kept in capsys.readouterr().err
    shutil.rmtree(tmp_path / "copy")
    paused = refactor(tiny, profile, tmp_path / "ft", max_minutes=1e-9, **options)
    assert not paused["finished"] and paused["out_dir"] is None
    assert paused["work_dir"] == str(tmp_path / "ft.partition")
    assert {path.name for path in tmp_path.iterdir()} == {"ft.partition"}
    killed_while_measured(tiny, profile, tmp_path / "ft", monkeypatch, options)
    with monkeypatch.context() as patch:
        patch.setattr(train, "finetune_router", None)  # trained already
        refactor(tiny, profile, tmp_path / "ft", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"ft"}


def killed_while_measured(tiny, profile, out, monkeypatch, options):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop = mock.Mock(side_effect=KeyboardInterrupt)
        patch.setattr(measure, "measure_model", stop)
        refactor(tiny, profile, out, **options)
    assert not out.exists()


def test_a_full_disk_at_the_end_loses_nothing(
    tiny, profile, text, tmp_path, monkeypatch
):
    """The model was moved first and then removed with the folder that failed."""
    options = {"gate": "lg_ft", "train_text": text}
    options["fine_tuning"] = {"tokens": 64, "batch_tokens": 64, "window": 64}

    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    kept = tmp_path / "ft.partition" / "model"
    message = f"ft: .*No space left.*; the refactored model is in {kept}, and the same"
    with monkeypatch.context() as patch, pytest.raises(OutputError, match=message):
        patch.setattr(run, "write_json", full)
        refactor(tiny, profile, tmp_path / "ft", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"ft.partition"}
    digest = read_manifest(kept)["content_sha256"]
    with monkeypatch.context() as patch:
        patch.setattr(train, "finetune_router", None)  # trained already
        refactor(tiny, profile, tmp_path / "ft", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"ft"}
    assert read_manifest(tmp_path / "ft")["content_sha256"] == digest


def test_default_gate_neurons_follow_the_width(tiny):
    moe = open_checkpoint(tiny).config.moe
    for width, expected in ((16, 1), (64 * 4, 4), (512 * 4, 4), (40 * 4, 2)):
        wide = dataclasses.replace(moe, expert_dim=width)
        assert Settings(gate="cg").num_gate_neurons(wide) == expected
    assert Settings(gate="lg").num_gate_neurons(moe) == 0
    assert Settings(gate="cg", gate_neurons=3).num_gate_neurons(moe) == 3


def test_default_solver_follows_the_gate(tiny, profile, tmp_path):
    chosen = {gate: Settings(gate=gate).chosen_solver for gate in ("lg", "cg", "lg_ft")}
    assert chosen == {"lg": "magnitude", "cg": "alternate", "lg_ft": "alternate"}
    assert Settings(restarts=2).chosen_solver == "alternate"
    assert Settings(gate="cg", solver="greedy").chosen_solver == "greedy"
    refactor(tiny, profile, tmp_path / "r", restarts=2)
    assert read_manifest(tmp_path / "r")["refactor"]["solver"] == "alternate"


def test_matrix_mode(tmp_path):
    matrix = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    np.save(tmp_path / "m.npy", matrix)
    summary = run_refactor(
        out_dir=str(tmp_path / "out"),
        activations=str(tmp_path / "m.npy"),
        restarts=3,
    )
    assert summary["objective"] > 0
    labels = np.load(tmp_path / "out" / "labels.npy")
    assert np.bincount(labels).tolist() == [4, 4, 4, 4]


def test_output_and_refactored_input_are_checked(cg, tiny, profile, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "mine.txt").write_text("x")
    with pytest.raises(OutputError, match="is not empty"):
        refactor(tiny, profile, tmp_path / "r")
    with pytest.raises(ConfigError, match="refactored already, into 4 sub-experts"):
        refactor(cg[0], profile, tmp_path / "again")
    dry = refactor(tiny, profile, tmp_path / "dry", dry_run=True)
    assert dry["dry_run"] and not (tmp_path / "dry").exists()
