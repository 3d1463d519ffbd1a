"""Files of experts: mapped, and refused where they are not as the graph says."""

import dataclasses

import numpy as np
import pytest

from moe_edge.core.checks import CheckpointError, ConfigError
from moe_edge.papers.coserve.coe.models import get_network
from moe_edge.papers.coserve.coe.store import ExpertStore, write_experts
from moe_edge.papers.coserve.workload.coe_graph import read_graph
from moe_edge.papers.coserve.workload.coe_weights import file_sha256
from tests.papers.coserve.support.coe_boards import write_board


@pytest.fixture
def store(tmp_path):
    write_board(tmp_path)
    return ExpertStore(read_graph(tmp_path / "coe.json"), tmp_path)


def test_records_are_read_only_views_of_what_was_written(store):
    store.check()
    for number, expert in enumerate(store.graph.experts):
        record_B = store.record(number)
        network = get_network(store.graph.architectures[expert.architecture])
        np.testing.assert_array_equal(record_B, network.init(number))
        assert isinstance(record_B, np.memmap) and not record_B.flags.writeable
        assert np.shares_memory(network.words(record_B), record_B)


def test_check_lists_missing_short_and_changed_files_at_once(store):
    store.path(1).unlink()
    store.path(2).write_bytes(b"short")
    for number in (4, 5):
        content = bytearray(store.path(number).read_bytes())
        content[7] ^= 1
        store.path(number).write_bytes(content)
    digest = file_sha256(store.path(4))[:12]
    with pytest.raises(CheckpointError) as error:
        store.check()
    text = str(error.value)
    assert "classifier_1 (" in text and "No such file" in text
    assert f"5 bytes, expected {store.record_bytes(2)}" in text
    assert f"sha256 {digest}, expected {store.graph.experts[4].sha256[:12]}" in text
    assert "classifier_5 (" in text and "as the graph says" in text
    assert " of 8 experts" in text and "in all" not in text and "\n" not in text


def test_check_lists_twenty_of_many_missing_files_and_says_how_many(tmp_path):
    graph = write_board(tmp_path, types=24)
    store = ExpertStore(graph, tmp_path)
    for number in range(23):
        store.path(number).unlink()
    with pytest.raises(CheckpointError) as error:
        store.check()
    text = str(error.value)
    assert all(f"classifier_{n} (" in text for n in range(20))
    assert ", .. (23 in all) of 26 experts" in text and "classifier_20 (" not in text


def test_name_that_no_file_can_have_is_refused_in_one_line(store):
    graph = store.graph
    for name, said in (("a\0b", "embedded null"), ("\ud800", "surrogates not allowed")):
        odd = dataclasses.replace(graph.experts[2], file=name)
        experts = [*graph.experts[:2], odd, *graph.experts[3:]]
        wrong = ExpertStore(dataclasses.replace(graph, experts=experts), store.folder)
        with pytest.raises(CheckpointError, match=f"classifier_2 .*{said}"):
            wrong.check()
        with pytest.raises(CheckpointError, match=f"'classifier_2': .*{said}"):
            wrong.record(2)


def test_file_that_vanishes_or_shrinks_during_a_run_names_its_expert(store):
    view = store.record(0)
    store.path(0).unlink()
    assert view.any()  # mapped pages stay
    with pytest.raises(CheckpointError, match="'classifier_0': .*No such file"):
        store.record(0)
    store.path(7).write_bytes(b"")
    with pytest.raises(CheckpointError, match="'detector_1': .* has 0 bytes, expected"):
        store.record(7)


def test_expert_without_file_or_with_another_record_is_refused(store):
    graph = store.graph
    bare = dataclasses.replace(graph.experts[3], file=None)
    experts = [*graph.experts[:3], bare, *graph.experts[4:]]
    with pytest.raises(ConfigError, match="classifier_3 of 8 experts have no file or"):
        ExpertStore(dataclasses.replace(graph, experts=experts), store.folder)
    kinds = dict(graph.architectures)
    kinds["board_detector"] = dataclasses.replace(
        kinds["board_detector"], record_bytes=7
    )
    other = dataclasses.replace(graph, architectures=kinds)
    with pytest.raises(ConfigError, match="'board_detector': record_bytes of .* is 7,"):
        ExpertStore(other, store.folder)


def test_written_files_have_the_hashes_that_are_returned(tmp_path):
    record_B = np.arange(128, dtype=np.uint8)
    (digest,) = write_experts(tmp_path, {"deep/x.bin": record_B}).values()
    assert digest == file_sha256(tmp_path / "deep/x.bin")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.bin"]
