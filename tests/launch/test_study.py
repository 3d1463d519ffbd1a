def test_study_unknown_name_is_refused_in_one_line(run_script, tmp_path):
    done = run_script("study", "--name", "fig0", "--out_dir", "o")
    assert "unknown study 'fig0'; known: " in done.error
    assert not (tmp_path / "o").exists()
