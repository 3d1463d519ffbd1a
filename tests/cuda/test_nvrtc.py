"""Our CUDA sources compile for the GPUs that people have, and into what is wanted."""

import itertools
import re

import pytest

from moe_edge.core.checks import ConfigError
from moe_edge.kernels import nvrtc

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def there_is_nvrtc():
    try:
        nvrtc.library()
    except ConfigError:
        pytest.skip("needs nvidia-cuda-nvrtc-cu12, see CONTRIBUTING.md")


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "12.0"])
def test_the_prefetch_compiles(capability):
    image, text = nvrtc.compile_cuda("prefetch.cu", capability)
    assert image[:4] == b"\x7fELF" and b"moe_edge_prefetch" in image
    assert f".target sm_{capability.replace('.', '')}" in text
    # Sixteen bytes a thread at once, and four such loads before the first store.
    wide = re.search(r"(ld\.global(\.nc)?\.v4.*?)st\.global", text, re.S)[1]
    assert len(re.findall(r"ld\.global(?:\.nc)?\.v4", wide)) == 4
    assert ".local" not in text, "nothing is spilled"


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "12.0"])
def test_few_rows_ask_for_whole_rows_before_anything_waits(capability):
    """Sixteen loads of sixteen bytes. Each takes 2 s."""
    image, text = nvrtc.compile_cuda("few.cu", capability)
    assert image[:4] == b"\x7fELF"
    entries = re.split(r"\.visible \.entry ", text)[1:]
    names = [re.match(r"\w+", entry)[0] for entry in entries]
    assert sorted(names) == ["moe_edge_few_bfloat16", "moe_edge_few_float32"]
    assert ".local" not in text and all(name.encode() in image for name in names)
    for entry in entries:
        words = r"ld\.global\.v4|st\.global\.v4|fma\.|\bbra\b|^\$L"
        order = re.findall(words, entry, re.M)
        runs = [
            len([*run])
            for word, run in itertools.groupby(order)
            if word == "ld.global.v4"
        ]
        # By one, two and four rows of x. What else is loaded meets them.
        assert runs.count(16) == 3 and {*runs} <= {1, 2, 16}
        assert order.count("st.global.v4") == 3 * 16
        # Nothing may be kept from before it was written.
        assert "ld.global.nc" not in entry


def test_what_does_not_compile_says_why():
    with pytest.raises(ConfigError, match="capability 3.0: .*INVALID_OPTION"):
        nvrtc.compile_cuda("prefetch.cu", "3.0")
    with pytest.raises(ConfigError, match="(cannot|could not) open source file"):
        nvrtc.compile_cuda("cuda_calls.h", "9.0")
