"""Measures how far lossy offloading is from the unmodified model: a fidelity card.

python launch/fidelity.py --checkpoint DIR --text FILE --device_memory 25%
python launch/fidelity.py --gin_file configs/policies/smoe.gin
python launch/fidelity.py --checkpoint QUANTISED
"""

from launch import common

if __name__ == "__main__":
    common.run("fidelity")
