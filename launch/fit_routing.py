"""Fits the routing generator to the measured domains (a few minutes, one core).

python launch/fit_routing.py --data_dir ../shared/data \
    --out moe_edge/workload/routing_domains.json
"""

import json

from absl import app, flags

from moe_edge.core.files import write_text
from moe_edge.workload.routing_fit import fit_all

DATA_DIR = flags.DEFINE_string("data_dir", None, "data folder", required=True)
OUT = flags.DEFINE_string("out", None, "JSON file to write", required=True)


def main(argv):
    """Writes the file and prints what was held out."""
    del argv
    fitted = fit_all(DATA_DIR.value)
    write_text(OUT.value, json.dumps(fitted, separators=(",", ":")) + "\n")
    held_out = {name: entry["held_out"] for name, entry in fitted["sources"].items()}
    print(json.dumps(held_out))


if __name__ == "__main__":
    app.run(main)
