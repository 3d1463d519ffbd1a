"""The tokenizer of a checkpoint: ids, text, begin-of-text, errors."""

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from moe_edge.convert.convert import convert_checkpoint
from moe_edge.convert.open import open_checkpoint
from moe_edge.convert.tokenizer import load_tokenizer
from moe_edge.core.checks import CheckpointError
from tests.support.tiny_checkpoints import hf_folder


def byte_tokenizer(adds_bos: bool) -> Tokenizer:
    """Every byte a token, and <s> = 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:99]
    vocab = {"<s>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.enable_truncation(3)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer


@pytest.mark.parametrize("adds_bos", [False, True])
def test_tokenizer_round_trip_adds_bos_only_if_told(tmp_path, adds_bos):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    byte_tokenizer(adds_bos).save(str(hf / "tokenizer.json"))
    tokenizer = load_tokenizer(open_checkpoint(hf))
    ids = tokenizer.encode("hello,world")
    assert len(ids) == 11 + adds_bos  # the file's truncation is not applied
    assert (ids[0] == 0) == adds_bos
    assert tokenizer.decode(ids) == "hello,world"


def test_tokenizer_missing_is_a_clear_error(tmp_path):
    reader = open_checkpoint(hf_folder(tmp_path / "hf", "olmoe"))
    with pytest.raises(CheckpointError, match="hf has no tokenizer.json"):
        load_tokenizer(reader)


def test_tokenizer_may_be_added_to_either_format(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    ours = tmp_path / "ours"
    convert_checkpoint(hf, ours, progress=False)
    for folder, place in ((hf, hf), (ours, ours / "hf")):
        with pytest.raises(CheckpointError) as told:
            load_tokenizer(open_checkpoint(folder))
        assert str(told.value).endswith(f"put the model's into {place}")
        byte_tokenizer(False).save(str(place / "tokenizer.json"))
        assert load_tokenizer(open_checkpoint(folder)).encode("ab")


def test_tokenizer_damaged_is_a_clear_error(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    (hf / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot read tokenizer"):
        load_tokenizer(open_checkpoint(hf))


def test_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe", vocab_size=50)
    byte_tokenizer(False).save(str(hf / "tokenizer.json"))
    with pytest.raises(
        CheckpointError, match="100 tokens exceed .* of 50: .*json; use"
    ):
        load_tokenizer(open_checkpoint(hf))


def test_token_bytes_of_byte_level_tokens_join_to_the_text(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    byte_tokenizer(False).save(str(hf / "tokenizer.json"))
    tokenizer = load_tokenizer(open_checkpoint(hf))
    (ids,) = tokenizer.encode_batch(["<s>hello,world"], begin=False, end=False)
    text = b"".join(tokenizer.token_bytes(id) for id in ids).decode()
    assert text == "<s>hello,world" == tokenizer.decode(ids, special=True)
    assert tokenizer.decode(ids) == "hello,world"
    assert tokenizer.token(0) == "<s>" and tokenizer.folder == hf
    assert (tokenizer.token(999), tokenizer.token_bytes(999)) == (None, b"")


def test_token_bytes_of_sentencepiece_with_byte_fallback(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    vocab = {"<s>": 0, "▁mill": 1, "s": 2, "<0xE2>": 3, "<0x0A>": 4, "▁": 5}
    inner = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<s>"])
    inner.save(str(hf / "tokenizer.json"))
    tokenizer = load_tokenizer(open_checkpoint(hf))
    found = [tokenizer.token_bytes(id) for id in range(6)]
    assert found == [b"<s>", b" mill", b"s", b"\xe2", b"\n", b" "]


def test_encode_batch_adds_bos_only_if_told_and_wanted(tmp_path):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    byte_tokenizer(True).save(str(hf / "tokenizer.json"))
    tokenizer = load_tokenizer(open_checkpoint(hf))
    plain, long = tokenizer.encode_batch(["a", "hello"])
    assert plain[0] == 0 and long == tokenizer.encode("hello")
    assert tokenizer.encode_batch(["a"], begin=False, end=False) == [plain[1:]]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.decode(long * 3000) == "hello" * 3000
    assert tokenizer.decode(long * 3000, special=True) == "<s>hello" * 3000


BEGIN, END = ("<s>", 0), ("!", 1)


@pytest.mark.parametrize(
    ("processor", "before", "after"),
    [
        (None, [], []),
        (processors.ByteLevel(), [], []),
        (processors.RobertaProcessing(END, BEGIN), [0], [1]),
        (
            processors.TemplateProcessing(
                single="<s> <s> $A ! !", special_tokens=[BEGIN, END]
            ),
            [0, 0],
            [1, 1],
        ),
        (
            processors.Sequence(
                [
                    processors.ByteLevel(),
                    processors.TemplateProcessing(single="$A !", special_tokens=[END]),
                ]
            ),
            [],
            [1],
        ),
    ],
)
@pytest.mark.parametrize("text", ["", "a!b"])
def test_encode_with_special_tokens_on_either_side(
    tmp_path, processor, before, after, text
):
    hf = hf_folder(tmp_path / "hf", "olmoe")
    inner = byte_tokenizer(False)
    if processor is not None:
        inner.post_processor = processor
    inner.save(str(hf / "tokenizer.json"))
    tokenizer = load_tokenizer(open_checkpoint(hf))
    ids = tokenizer.encode(text, begin=False, end=False)
    assert len(ids) == len(text)
    for begin in (True, False):
        for end in (True, False):
            want = [*before * begin, *ids, *after * end]
            options = {"begin": begin, "end": end}
            assert tokenizer.encode(text, **options) == want
            assert tokenizer.encode_batch([text], **options) == [want]
    assert tokenizer.encode(text) == [*before, *ids, *after]


def whole_alphabet(*tokens: str) -> Tokenizer:
    """Every byte a token, and such as `tokens` say."""
    vocab = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    merges = []
    for token in tokens:  # each the one before it and a letter
        vocab[token] = len(vocab)
        merges.append((token[:-1], token[-1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def sentencepiece(bytes_known: int = 256) -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(bytes_known)}
    vocab |= {"▁": 256, "a": 257, "▁a": 258, "▁▁": 259}
    inner = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "▁")], byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return inner


def split_off(behavior: str, pattern: str = " ") -> Tokenizer:
    inner = whole_alphabet("ab", "abc")
    split = pre_tokenizers.Split(pattern, behavior)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return inner


def with_step(step, inner: Tokenizer | None = None) -> Tokenizer:
    inner = inner or whole_alphabet("ab", "abc")
    inner.normalizer = step
    return inner


def with_added(**options) -> Tokenizer:
    inner = whole_alphabet()
    inner.add_special_tokens([AddedToken("<é>", **options)])
    return inner


@pytest.mark.parametrize(
    ("inner", "longest"),
    [
        (whole_alphabet(), 1),
        (whole_alphabet("Ġa", "Ġab"), 3),
        (with_added(), 4),
        (split_off("isolated"), 3),
        (with_step(normalizers.NFC()), 12),
        (with_step(normalizers.Sequence([])), 3),
        (sentencepiece(), 6),
        # Letters may be dropped, or fused to any number.
        (byte_tokenizer(False), None),
        (sentencepiece(255), None),
        (split_off("removed"), None),
        (with_step(normalizers.Strip()), None),
        (with_step(normalizers.Replace("ab", "")), None),
        (with_step(normalizers.Replace(Regex(" +"), " ")), None),
        (with_added(lstrip=True), None),
        (with_added(rstrip=True), None),
        (Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")), None),
    ],
)
def test_longest_text_of_a_token(tmp_path, inner, longest):
    hf = hf_folder(tmp_path / "hf", "olmoe", vocab_size=300)
    inner.save(str(hf / "tokenizer.json"))
    tokenizer = load_tokenizer(open_checkpoint(hf))
    assert tokenizer.longest() == longest
    # Letters that become fewer bytes (of NFC, the worst), long tokens, odd spaces.
    texts = ["\u03b9\u0344" * 50, "▁ " * 50, "abc" * 50, "<é>" * 50, "  a\n\r 🦊" * 9]
    if longest is not None:
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            assert len(text.encode()) <= longest * len(ids)
