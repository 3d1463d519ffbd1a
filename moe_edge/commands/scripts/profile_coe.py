"""Measures the experts of a graph on this machine, for launch/coserve.py.

python launch/profile_coe.py --graph W/coe.json --out_dir P
"""

from launch import common

if __name__ == "__main__":
    common.run("profile_coe")
