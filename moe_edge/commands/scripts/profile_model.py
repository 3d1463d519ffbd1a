"""Runs calibration text through a model and stores what its experts do with it.

python launch/profile_model.py --checkpoint default --text FILE --out_dir P
python launch/profile_model.py --text wikitext:a.txt,books:b.txt,books:c.txt --out_dir P
"""

from launch import common

if __name__ == "__main__":
    common.run("profile_model")
