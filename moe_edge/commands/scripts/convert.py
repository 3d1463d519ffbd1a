"""Converts a Hugging Face folder or a GGUF file to our format, or back.

python launch/convert.py --src HF --dst OURS
python launch/convert.py --src HF --dst Q --expert_dtype q8_0
python launch/convert.py --src FILE.gguf --dst OURS
python launch/convert.py --src OURS --dst HF --to hf
python launch/convert.py --src OURS --verify
"""

from launch import common

if __name__ == "__main__":
    common.run("convert_checkpoint", out_parameter="dst")
