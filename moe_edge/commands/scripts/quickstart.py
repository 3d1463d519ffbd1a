"""Shows the default model at work in less than three minutes; needs no flags.

python launch/quickstart.py
"""

from launch import common

if __name__ == "__main__":
    common.run("quickstart")
