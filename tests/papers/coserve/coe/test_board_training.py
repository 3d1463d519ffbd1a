"""Training a board of few, narrow experts for a few steps."""

import json
import shutil

import numpy as np
import pytest

from moe_edge.core.checks import CheckpointError
from moe_edge.papers.coserve.coe.accuracy import read_accuracy
from moe_edge.papers.coserve.coe.board_training import file_of
from moe_edge.papers.coserve.coe.models import VERDICTS, get_network, make_architecture
from moe_edge.papers.coserve.coe.store import ExpertStore, write_experts
from moe_edge.papers.coserve.coe.train_board import run_train_board
from moe_edge.papers.coserve.coe.train_expert import (
    FIRST_SEED,
    HELD_OUT_SEED,
    Recipe,
    accuracy_of,
    classifier_part,
    detector_part,
    held_out,
    targets_of,
    train_network,
    wanted,
)
from moe_edge.papers.coserve.workload.board import SHAPE
from moe_edge.papers.coserve.workload.coe_graph import read_graph
from tests.papers.coserve.support.coe_boards import DETECTED

SMALL = {"types": 4, "trained_types": 3, "width": 4, "steps": 4, "batch": 16}


def train(folder, **changes):
    return run_train_board(out_dir=str(folder), **SMALL | changes)


@pytest.fixture(scope="module", autouse=True)
def few_images():
    """Accuracies of so little training need no thousand images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_edge.papers.coserve.coe.train_expert.HELD_OUT_IMAGES", 128)
        patch.setattr("moe_edge.papers.coserve.coe.single_model.IMAGES", 64)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board") / "W"
    return folder, train(folder, compare="single")


def files(folder):
    """What experts and networks beside them weigh, by name."""
    found = {path.name: path.read_bytes() for path in folder.rglob("*.bin")}
    assert len({name.rpartition("-")[0] for name in found}) == len(found)
    return {name.rpartition("-")[0]: content for name, content in found.items()}


def path_of(folder, name):
    """Of the weights of an expert."""
    (path,) = (folder / "experts").glob(f"{name}-*.bin")
    return path


def test_board_has_all_weights_and_says_which_are_trained(trained):
    folder, summary = trained
    graph = read_graph(folder / "coe.json")
    ExpertStore(graph, folder).check()
    assert [e.trained for e in graph.experts] == [True, True, True, False, True]
    assert (summary["types"], summary["trained"]) == (4, 4)
    assert 0 <= summary["accuracy_min"] <= summary["accuracy_mean"] <= 1
    assert summary["seconds"] > 0 and summary["out_dir"] == str(folder)
    records = [ExpertStore(graph, folder).record(e) for e in range(5)]
    network = get_network(graph.architectures["board_resnet"])
    first, copied = (network.unpack(np.array(records[e])) for e in (0, 3))
    name = "stage1.a.kernel"
    assert (first[name] != copied[name]).mean() > 0.9
    np.testing.assert_allclose(first[name], copied[name], rtol=0.3)


def test_accuracies_of_the_collaboration_and_of_single_networks_are_told(trained):
    folder, _ = trained
    found = dict(read_accuracy(folder, read_graph(folder / "coe.json")))
    assert found.keys() == {"collaboration", "single", "single_wide"}
    assert found.pop("single_wide") is None  # not asked for
    assert all(0 < share < 1 for share in found.values())
    state = json.loads((folder / "training.json").read_text())
    assert state["single"]["steps"] == 4 * SMALL["steps"]
    assert (folder / file_of("single", state["single"]["sha256"])).is_file()


@pytest.mark.slow
def test_both_networks_beside_a_board_are_trained_one_of_them_four_times_as_wide(
    tmp_path,
):
    train(tmp_path, types=1, trained_types=1, width=1, steps=2, compare="all")
    found = read_accuracy(tmp_path, read_graph(tmp_path / "coe.json"))
    assert found.keys() == {"collaboration", "single", "single_wide"}
    assert all(0 < share < 1 for share in found.values())
    train(tmp_path, types=1, trained_types=1, width=1, steps=2, compare="single")
    again = read_accuracy(tmp_path, read_graph(tmp_path / "coe.json"))
    assert again == found  # the wide one is still there
    state = json.loads((tmp_path / "training.json").read_text())
    weights = {}  # read as what they should be; another size has other bytes
    for name, width in (("single", 1), ("single_wide", 4)):
        assert state[name]["steps"] == 2
        made = make_architecture(
            "board_resnet", {"width": width}, SHAPE, VERDICTS, "bfloat16"
        )
        path = tmp_path / file_of(name, state[name]["sha256"])
        weights[name] = get_network(made).unpack(np.fromfile(path, np.uint8))
    shapes = [arrays["stage1.a.kernel"].shape for arrays in weights.values()]
    assert shapes[1][-2:] == tuple(4 * n for n in shapes[0][-2:])


def test_second_call_trains_what_is_missing_changed_or_new_only(trained, capsys):
    folder, before = trained
    weights = files(folder)
    path_of(folder, "classifier_1").unlink()
    path_of(folder, "classifier_2").write_bytes(b"damaged")
    kept = [path_of(folder, name) for name in ("classifier_0", "detector_0")]
    stamps = [path.stat().st_mtime_ns for path in kept]
    assert train(folder)["accuracy_mean"] == before["accuracy_mean"]
    assert files(folder) == weights  # the same once more, bit for bit
    assert [path.stat().st_mtime_ns for path in kept] == stamps
    assert "4/4 detector_0: accuracy" in capsys.readouterr().err
    assert train(folder, types=6, trained_types=3)["trained"] == 4
    larger = files(folder)
    kept = [f"classifier_{n}" for n in range(3)]
    assert all(larger[name] == weights[name] for name in kept)
    train(folder, seed=5)
    assert all(files(folder)[name] != weights[name] for name in kept)


def test_board_that_is_trained_again_stays_whole_until_the_new_one_is(
    trained, tmp_path, monkeypatch
):
    folder = tmp_path / "W"
    shutil.copytree(trained[0], folder)
    train(folder, compare="single")  # whatever other tests trained there
    old, seen = (folder / "coe.json").read_bytes(), []
    (folder / "experts/classifier_9.bin").touch()  # as older versions named them
    (folder / "experts/.detector_0-0123456789abcdef.bin.partial").touch()
    (folder / "experts/mine.bin").touch()

    def check(folder):
        graph = read_graph(folder / "coe.json")
        ExpertStore(graph, folder).check()
        shares = read_accuracy(folder, graph)
        seen.append(
            (
                (folder / "coe.json").read_bytes() == old,
                shares is not None,
            )
        )

    def write(*given):
        check(folder)
        found = write_experts(*given)
        check(folder)
        if len(seen) == 4 and not killed:
            raise KeyboardInterrupt
        return found

    killed = []
    monkeypatch.setattr(
        "moe_edge.papers.coserve.coe.board_training.write_experts", write
    )
    with pytest.raises(KeyboardInterrupt):
        train(folder, seed=9)
    killed.append(True)
    check(folder)
    assert set(seen) == {(True, True)}
    train(folder, seed=9)
    assert set(seen) == {(True, True)} and len(seen) == 5 + 2 * 3  # two were written
    check(folder)
    assert seen[-1] == (False, False)  # accuracies were of other weights
    left = {path.name.rpartition("-")[0] for path in (folder / "experts").iterdir()}
    graph = read_graph(folder / "coe.json")
    assert left == {expert.id for expert in graph.experts} | {""}
    assert (folder / "experts/mine.bin").is_file()


def test_notes_of_another_form_are_refused_in_one_line(trained, tmp_path):
    path = tmp_path / "training.json"
    facts = {"spec": "s", "sha256": 3, "accuracy": 1, "steps": 1, "seconds": 1}
    for notes, said in (
        ([], f"{path} is \\[\\], expected names and values"),
        ({"single": None}, f"{path}: 'single' is None, expected names and values"),
        ({"single": {}}, f"{path}: 'single' lacks spec"),
        ({"single": facts}, f"{path}: 'single': sha256 is 3, expected a text"),
    ):
        path.write_text(json.dumps(notes))
        with pytest.raises(CheckpointError, match=f"^{said}; delete it to train all"):
            train(tmp_path)


def test_training_teaches_a_detector_where_components_lie():
    """A narrow one; to say the same of every image is right in a third."""
    recipe = Recipe(steps=150, batch=16, learning_rate=5e-3)
    made = make_architecture("board_detector", {"width": 4}, SHAPE, DETECTED)
    network, parts = get_network(made), [detector_part("component_3")]
    record_B = network.pack(train_network(network, parts, recipe, 1))
    assert accuracy_of(network, record_B, parts, 0) > 0.9
    assert accuracy_of(network, network.init(0), parts, 0) < 0.5


def test_held_out_images_are_never_trained_on_and_hold_every_defect():
    part = classifier_part("component_1", followed=True)
    images = held_out(part, 16, seed=3)
    assert all(2**31 < HELD_OUT_SEED <= one["seed"] < FIRST_SEED for one in images)
    assert len({one["seed"] for one in images}) == 16
    network = get_network(
        make_architecture("board_resnet", {}, SHAPE, ["ok", "damaged"])
    )
    assert [wanted(network, one) for one in images].count("damaged") == 8
    targets = targets_of(network, images)
    assert targets.tolist() == [int(one["defect"] == "damaged") for one in images]


def test_detectors_learn_shift_and_turn():
    made = make_architecture("board_detector", {}, SHAPE, DETECTED)
    images = held_out(detector_part("component_1"), 6, seed=0)
    targets = targets_of(get_network(made), images)
    assert targets.shape == (6, 4)
    turned = [one["defect"] == "wrong_polarity" for one in images]
    assert (targets[:, 2] < 0).tolist() == turned
    judged = get_network(made).judge(targets)
    assert [verdict for verdict, _ in judged] == [
        one["defect"] or "ok" for one in images
    ]
