"""Measures this machine for the cost model; the result is usable as a preset.

python launch/profile_machine.py --out_dir DIR
"""

from launch import common

if __name__ == "__main__":
    common.run("profile_machine")
