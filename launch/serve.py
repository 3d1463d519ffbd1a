"""Serves a model to clients of OpenAI's API, on one machine.

python launch/serve.py --checkpoint default --port 8000
python launch/serve.py --checkpoint R --port 8000 --device_memory 25%
"""

from launch import common

if __name__ == "__main__":
    common.run("serve")
