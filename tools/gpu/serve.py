"""The server and the default model: seconds until ready, seconds and text of requests.

Writes OUT_DIR/serve.json. Starts `launch/serve.py` and ends it.
"""

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from moe_edge.core.files import write_json
from moe_edge.core.json_reader import parse_json

ROOT = Path(__file__).parents[2]
PROMPT = "Anna put the key on the table. Ben"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out_dir", required=True, help="folder of serve.json")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    given = parser.parse_args()
    script = [sys.executable, str(ROOT / "launch/serve.py"), "--port", "0"]
    # Small, so that few programs are compiled.
    sizes = {"max_batch": 1, "max_context": 128, "prefill_chunk": 32}
    script += ["--checkpoint", "default"]
    script += [
        word for name, size in sizes.items() for word in (f"--{name}", f"{size}")
    ]
    begun_s, found = time.monotonic(), {}
    # Its complaints go where ours go.
    server = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        found["ready_s"] = time.monotonic() - begun_s
        url = parse_json("serve's line", line)["url"]
        for name in ("first", "second"):
            begun_s = time.monotonic()
            answer = _complete(url, given.tokens)
            took_s = time.monotonic() - begun_s
            found[name] = {"s": took_s, "text": answer["choices"][0]["text"]}
            write_json(Path(given.out_dir) / "serve.json", found)
    finally:
        server.terminate()
        server.communicate(timeout=20)
    print(found)


def _complete(url: str, tokens: int) -> dict:
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return parse_json("serve's answer", response.read())


if __name__ == "__main__":
    main()
