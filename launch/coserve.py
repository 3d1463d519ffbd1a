"""Serves requests for a collaboration of many expert models (CoServe), and compares.

python launch/coserve.py --simulate numa --task a1 --out_dir DIR
python launch/coserve.py --simulate numa --graph G.json --requests R.jsonl \\
    --policies samba,coserve,affinity --out_dir DIR

All times are computed: from a preset machine, or from a coe_profile.json.
"""

from launch import common

if __name__ == "__main__":
    common.run("coserve")
