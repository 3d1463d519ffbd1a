def test_study_unknown_name_is_refused_in_one_line(run_script, tmp_path):
    done = run_script("study", "--name", "fig0", "--out_dir", "o")
    assert "unknown study 'fig0'; known: " in done.error
    assert not (tmp_path / "o").exists()


def test_study_whose_text_is_missing_names_data_dir(run_script, tmp_path):
    flags = ("--name", "moe_prism_table2", "--out_dir", "o", "--dry_run")
    error = run_script("study", *flags).error
    assert "text/wikitext-2/test.txt is not here and no --data_dir was given" in error
