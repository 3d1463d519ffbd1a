"""Serves requests for a collaboration of many expert models (CoServe), and compares.

python launch/coserve.py --graph G.json --requests R.jsonl \\
    --policies samba,coserve,affinity --out_dir DIR
python launch/coserve.py --simulate numa --task a1 --out_dir DIR

Live on this machine; loads are emulated where there is no GPU. With --simulate all
times are computed: on a preset machine, or by the costs of a coe_profile.json.
"""

from launch import common

if __name__ == "__main__":
    common.run("coserve")
