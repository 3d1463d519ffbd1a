"""Continues prompts with a model.

python launch/generate.py --prompt "Once upon a time" --max_new_tokens 48
python launch/generate.py --prompt Once --gin_file configs/policies/smoe.gin
"""

from launch import common

if __name__ == "__main__":
    common.run("generate")
