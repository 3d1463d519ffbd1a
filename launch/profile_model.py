"""Runs calibration text through a model and stores what its experts do with it.

python launch/profile_model.py --checkpoint default --text FILE --out_dir P
python launch/profile_model.py --text wikitext:a.txt,books:b.txt,books:c.txt --out_dir P
"""

from absl import flags

from launch import common

FLAGS = (
    common.define_data_dir(),
    flags.DEFINE_string("checkpoint", None, "folder, or `default` (default)"),
    flags.DEFINE_string("text", None, "UTF-8 files, [DOMAIN:]PATH with commas between"),
    flags.DEFINE_integer("window", None, "tokens, default min(512, context)"),
    flags.DEFINE_integer("tokens", None, "of all domains together, default 131072"),
    flags.DEFINE_integer(
        "max_tokens_per_expert", None, "rows of activations of each, default 2048"
    ),
    flags.DEFINE_integer("batch_size", None, "windows run together, default 4"),
    flags.DEFINE_bool("resume", None, "go on with a killed run, default yes"),
)

if __name__ == "__main__":
    common.run("profile_model", FLAGS)
