"""What a GGUF tokenizer's `pre` name stands for: how text is cut before merges.

A file names only the rule. The rules are those of the models' own tokenizer.json, whose
expressions llama.cpp quotes (src/llama-vocab.cpp), and their normaliser, which it
leaves out: Qwen's, OLMo's and Hunyuan's compose accents (NFC). Of MiniMax-M2, K-EXAONE
and Solar Open no normaliser is known to us, so text stays as it is, as in llama.cpp.
"""

from typing import Any, NamedTuple

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _class(ranges: str) -> str:
    """A class of characters by number: editors and tools change rare letters."""
    ends = [[chr(int(end, 16)) for end in r.split("-")] for r in ranges.split()]
    return "[" + "".join("-".join(end) for end in ends) + "]+"


_LETTERS = _class(
    """
    41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377
    37b-37d 37f 386 388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5
    13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a
    1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d
    1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec
    1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128
    212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b
    2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787
    a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f
    104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943
    """
)
_SIGNS = _class("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002")
_CJK = _class("4e00-9fa5 800-4e00 ac00-d7ff")
_HAN_KANA = _class("4e00-9fa5 3040-309f 30a0-30ff")
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


# Kimi's words have no Chinese characters in them, which are cut apart.
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI_UPPER, _KIMI_LOWER = _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN
_KIMI_K2 = (
    r"\p{Han}+|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_ENDING}|"
    r"\p{N}{1,3}" + _REST
)
# Words of K-EXAONE go on behind a space; lines end one at a time.
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


class Pre(NamedTuple):
    """One way to cut text.

    Attributes:
      cuts: expressions, applied one after another; () and `gpt2`: GPT-2's alone.
      gpt2: whether GPT-2's own expression is applied last.
      nfc: whether accents are composed first.
      ignore_merges: whether a whole word that is a token is not cut.
      adds_bos: where the file does not say.
    """

    cuts: tuple[str, ...] = ()
    gpt2: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_QWEN2 = Pre((_WORDS + r"\p{N}" + _REST,), nfc=True)
_LLAMA3 = Pre((_WORDS + r"\p{N}{1,3}" + _REST,), ignore_merges=True, adds_bos=True)
_GLM4 = Pre((_WORDS + r"\p{N}{1,3}" + _REST,), ignore_merges=True)
_GPT_4O = Pre((_O200K,))
_STARCODER = Pre((r"\p{N}",), gpt2=True)
KNOWN = {
    "gpt-2": Pre(gpt2=True),
    "olmo": Pre(gpt2=True, nfc=True),
    "starcoder": _STARCODER,
    "smollm": _STARCODER,
    "refact": _STARCODER,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
    "minimax-m2": _GPT_4O,
    "glm4": _GLM4,
    "glm5": _GLM4,
    # A tiktoken vocabulary: a whole word that is a token needs no merges.
    "hunyuan": _QWEN2._replace(ignore_merges=True),
    "solar-open": _QWEN2._replace(nfc=False),
    "exaone-moe": Pre((_EXAONE_MOE,)),
    "kimi-k2": Pre((_KIMI_K2,), ignore_merges=True),  # a tiktoken vocabulary
    "deepseek-llm": Pre(
        (
            r"[\r\n]",
            r"\s?" + _LETTERS,
            r"\s?" + _SIGNS,
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": Pre((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK_V3)),
}


def pre_tokenizer(pre: Pre) -> dict[str, Any]:
    """It as a part of tokenizer.json."""
    steps: list[dict[str, Any]] = [
        {
            "type": "Split",
            "pattern": {"Regex": cut},
            "behavior": "Isolated",
            "invert": False,
        }
        for cut in pre.cuts
    ]
    steps.append(byte_level(pre.gpt2))
    return {"type": "Sequence", "pretokenizers": steps}


def byte_level(use_regex: bool = True) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }
