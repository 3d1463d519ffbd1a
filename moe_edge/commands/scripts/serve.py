"""Serves a model to clients of OpenAI's API.

python launch/serve.py --checkpoint default --port 8000
python launch/serve.py --checkpoint R --port 8000 --device_memory 25%
python launch/serve.py --checkpoint R --port 8000 --servers 3 --slots 150,150,200
"""

from launch import common

if __name__ == "__main__":
    common.run("serve")
