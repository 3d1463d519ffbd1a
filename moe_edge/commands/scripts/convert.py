"""Converts a Hugging Face folder or a GGUF file to our format, or back.

moe-edge convert --src HF --dst OURS
moe-edge convert --src HF --dst Q --expert_dtype q8_0
moe-edge convert --src FILE.gguf --dst OURS
moe-edge convert --src OURS --dst HF --to hf
moe-edge convert --src OURS --verify
moe-edge convert --src HF --check
"""

from moe_edge.commands import common


def main() -> None:
    """The command; never returns."""
    common.run("convert_checkpoint", __doc__, out_parameter="dst")
