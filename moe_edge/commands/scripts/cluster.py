"""Serves requests on several processes that hold a model's experts together (Prism).

python launch/cluster.py --servers 3 --prompts prompts.jsonl --max_new_tokens 48
python launch/cluster.py --servers 3 --workload arithmetic,words,stories --period_s 5
"""

from launch import common

if __name__ == "__main__":
    common.run("cluster")
