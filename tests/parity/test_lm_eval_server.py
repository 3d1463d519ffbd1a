"""lm-eval over HTTP gives what launch/lm_eval.py gives (extra `eval`)."""

import json
import os
import subprocess
import sys

import pytest

from moe_edge.engine.load import load_engine
from moe_edge.engine.offload_options import OffloadOptions
from moe_edge.engine.slots import RowSlots
from moe_edge.evaluate.run_lm_eval import run_lm_eval
from moe_edge.schedule.continuous import Continuous
from moe_edge.schedule.loop import NO_LIMITS, RequestLoop
from moe_edge.serve.driver import Driver
from tests.support.live_server import MAX_BATCH, checkpoint, live_server
from tests.support.lm_eval_tasks import write_tasks

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
TASKS = "tiny_choice,tiny_until,tiny_rolling"


def offloaded() -> Driver:
    options = OffloadOptions(device_memory="60%")
    engine = load_engine(checkpoint(), with_tokenizer=False, offload=options).engine
    sizes = {"max_rows": MAX_BATCH, "max_context": 128, "prefill_chunk": 32}
    slots = RowSlots(engine, **sizes, prompt_rows=2)
    loop = RequestLoop(Continuous(MAX_BATCH), limits=NO_LIMITS)
    driver = Driver(slots, loop)
    driver.let = lambda: None  # what `live_server` does to its own at the end
    return driver


@pytest.mark.parametrize("device_memory", [None, "60%"])
def test_tasks_over_http_are_those_of_the_engine(tmp_path, device_memory):
    folder, out = write_tasks(tmp_path / "tasks"), tmp_path / "served"
    given = {"tasks": TASKS, "include_path": str(folder)}
    ours = run_lm_eval(
        **given,
        checkpoint=str(checkpoint()),
        device_memory=device_memory,
        out_dir=str(tmp_path / "ours"),
    )
    with live_server(load=device_memory and offloaded) as server:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        model = f"model=tiny,base_url={url},max_length=128,num_concurrent=4"
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
        command += ["--model_args", model, "--tasks", TASKS]
        command += ["--include_path", str(folder), "--output_path", str(out)]
        environment = os.environ | {
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "1",  # nothing is asked of the hub
        }
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert server.thread.summary()["outcomes"]["finished"] > 10
    (file,) = out.rglob("results_*.json")
    found = json.loads(file.read_text())["results"]
    assert set(found) == set(ours["tasks"])
    for task, metrics in ours["tasks"].items():
        for name, value in metrics.items():
            if "stderr" not in name:
                assert found[task][name] == pytest.approx(value, rel=1e-5), name
