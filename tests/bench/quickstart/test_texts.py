from moe_edge.bench.quickstart.texts import held_out_texts, task_prompts


def test_held_out_texts_are_two_different_texts_a_domain():
    texts = held_out_texts(3000, seed=0)
    assert len(texts) == 6
    for first, second in texts.values():
        assert first != second
        assert 1000 < len(first) <= 4500 and 1000 < len(second) <= 4500
    assert texts == held_out_texts(3000, seed=0)
    assert texts["words"] != held_out_texts(3000, seed=1)["words"]


def test_task_prompts_end_where_the_answer_belongs():
    for prompt, answer in task_prompts(seed=0):
        assert prompt.text.endswith("\nAnswer:")
        assert answer
