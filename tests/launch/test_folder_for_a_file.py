"""A folder given where a command reads or writes a file: one line that says so."""

import pytest

FOLDER = "the_folder"


@pytest.mark.parametrize(
    "command",
    [
        "coserve --task a1 --requests the_folder",
        "evaluate --text the_folder",
        "evaluate --mcq the_folder",
        "evaluate --tokens the_folder --logits x.npz",
        "generate --prompts the_folder",
        "generate --prompt a --device_memory 25% --trace the_folder",
        "cluster --servers 2 --prompts the_folder",
        "cluster --servers 2 --workload words,words --secret_file the_folder",
        "load --target computed --poisson 1 --costs the_folder",
        "load --target replay --decisions the_folder",
        "place_experts --statistics the_folder --server_domains a --slots 9",
        "refactor --activations the_folder",
        "replay --trace the_folder --slots_per_layer 4",
        "serve --chat_template the_folder",
        "serve --request_log the_folder",
        "simulate --routing_trace the_folder",
    ],
)
def test_folder_for_a_file_is_refused_in_words(run_script, tmp_path, command):
    (tmp_path / FOLDER).mkdir()
    name, *flags = command.split()
    out = () if name == "serve" else ("--out_dir", "o")
    error = run_script(name, *flags, *out, "--dry_run").error
    assert f"{FOLDER} is a folder" in error
    assert "file in it" in error and "[Errno" not in error


def test_fit_routing_refuses_a_folder_before_it_computes(run_script, tmp_path):
    (tmp_path / FOLDER).mkdir()
    error = run_script("fit_routing", "--data_dir", ".", "--out", FOLDER).error
    assert error == f"error: output file {FOLDER} is a folder; name a file in it"


def test_errors_of_the_system_start_with_the_file(run_script):
    done = run_script("fit_routing", "--data_dir", ".", "--out", "o")
    assert done.error == (
        "error: cannot read routing/expert_counts.jsonl: No such file or directory"
    )
