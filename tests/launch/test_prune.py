from tests.support.tiny_checkpoint import TEXT


def test_prune_writes_a_checkpoint_that_generates(run_script, tiny, tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    flags = ["--checkpoint", tiny, "--text", "t.txt", "--out_dir", "p"]
    run_script("profile_model", *flags)
    flags = ["--checkpoint", tiny, "--profile", "p", "--out_dir", "d"]
    done = run_script("prune", *flags, "--remove", 0.25, "--by", "frequency")
    assert set(done.summary) == {
        *("experts", "choices_lost", "bytes", "content_sha256", "out_dir")
    }
    assert done.summary["experts"] == 6
    made = run_script("generate", "--checkpoint", "d", "--prompt", "The", "--seed", 1)
    assert made.summary["tokens_per_s"] > 0


def test_prune_without_a_profile_is_one_line(run_script, tiny):
    error = run_script("prune", "--checkpoint", tiny, "--profile", "none").error
    assert "none holds no profile.json; make a profile with" in error
