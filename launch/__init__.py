"""The commands from a clone: `python launch/NAME.py` is `moe-edge NAME`.

No code is here, and no other code imports it: another package may be called `launch`.
"""
