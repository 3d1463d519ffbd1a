"""Sends requests at their times, and says how they were served.

python launch/load.py --target http://127.0.0.1:8000 --poisson 8 --duration_s 60
python launch/load.py --target engine --poisson 2 --floors 8:1,16:1,24:1,32:1
python launch/load.py --target computed --costs machine.json --poisson 8
"""

from launch import common

if __name__ == "__main__":
    common.run("load")
