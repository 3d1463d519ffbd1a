"""Converts a Hugging Face folder to our format, or back.

python launch/convert.py --src HF --dst OURS
python launch/convert.py --src OURS --dst HF --to hf
python launch/convert.py --src OURS --verify
"""

from absl import flags

from launch import common

FLAGS = (
    flags.DEFINE_string("src", None, "checkpoint to read, either format or `default`"),
    flags.DEFINE_string("dst", None, "folder to write; --out_dir means the same"),
    flags.DEFINE_string("to", None, "ours (default) or hf"),
    flags.DEFINE_string("dtype", None, "of weights: float32, bfloat16, float16"),
    flags.DEFINE_bool("allow_nonfinite", None, "accept NaN and infinity in weights"),
    flags.DEFINE_bool("verify", None, "compare the weights of --src with their hash"),
    flags.DEFINE_string("shard_size", None, "of safetensors files, default 5GB"),
)

if __name__ == "__main__":
    common.run("convert_checkpoint", FLAGS, out_parameter="dst")
