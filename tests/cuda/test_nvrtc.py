"""Our CUDA sources compile for the GPUs that people have, and into what is wanted."""

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
    image = nvrtc.compile_cuda("prefetch.cu", capability)
    assert image[:4] == b"\x7fELF" and b"moe_edge_prefetch" in image
    text = nvrtc.compile_cuda("prefetch.cu", capability, "PTX").decode()
    assert f".target sm_{capability.replace('.', '')}" in text
    # Sixteen bytes a thread at once, and four such loads before the first store.
    wide = re.search(r"(ld\.global(\.nc)?\.v4.*?)st\.global", text, re.S)[1]
    assert len(re.findall(r"ld\.global(?:\.nc)?\.v4", wide)) == 4
    assert ".local" not in text, "nothing is spilled"


def test_what_does_not_compile_says_why():
    with pytest.raises(ConfigError, match="capability 3.0: .*INVALID_OPTION"):
        nvrtc.compile_cuda("prefetch.cu", "3.0")
    with pytest.raises(ConfigError, match="could not open source file"):
        nvrtc.compile_cuda("cuda_calls.h", "9.0")
