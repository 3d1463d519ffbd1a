"""The root of `moe-edge load`: requests at their times, and how they were served."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_edge.core.checks import ConfigError, check_positive
from moe_edge.core.files import check_out_file, check_there, write_json, write_text
from moe_edge.core.run_folder import RunFolder, root, unpacked
from moe_edge.core.typed import changed
from moe_edge.engine.devices import check_devices
from moe_edge.engine.offload_options import OffloadOptions, resolve_offload
from moe_edge.loadtest.computed import computed_results
from moe_edge.loadtest.decisions_file import (
    read_decisions,
    replay_decisions,
    write_decisions,
)
from moe_edge.loadtest.http_client import parse_url
from moe_edge.loadtest.offered import LoadOptions
from moe_edge.loadtest.results import Results
from moe_edge.serve.api_key import read_key
from moe_edge.serve.options import ServingOptions

TARGETS = ("engine", "computed", "replay")  # besides URLs


@root
@unpacked(load=LoadOptions, options=ServingOptions)
def run_load(
    run: RunFolder,
    *,
    target: str,
    load: LoadOptions,
    options: ServingOptions,
    checkpoint: str | None = None,
    slo_ttft_ms: float = 500.0,
    slo_tpot_ms: float = 20.0,
    decisions: str | None = None,
    api_key_file: str | None = None,
    device_memory: str | None = None,
    offload: OffloadOptions | None = None,
    devices: int | str | None = None,
) -> dict[str, Any]:
    """Sends requests at their times and says how they were served.

    Args:
      run: folder of `load.json` and `requests.csv`.
      target: URL of a server, `engine` (in this process), `computed` (time by --costs)
        or `replay` (of --decisions).
      load: the requests; options: of the engine, or the computed one.
      checkpoint: folder, GGUF file or `default`: for `engine` the model (None:
        default), for `computed` where K and the context come from (None: from --costs
        and the options).
      slo_ttft_ms: limit of the time to the first token, of the requests that
        `slo_attainment` counts.
      slo_tpot_ms: limit of the mean time between two of its tokens.
      decisions: file for what the scheduler decided; `replay` reads it.
      api_key_file: file with the server's key; None: the environment variable
        MOE_EDGE_API_KEY.
      device_memory: for `engine`: a share of the experts' bytes (`25%`), or a size
        (`2GiB`) that also holds the dense weights, the KV cache and staging; `auto`:
        nine tenths of what the device has free, on a CPU with options of a short plan;
        None: as the gin file's `offload` says, or all experts on the device.
      offload: policies of experts that do not fit.
      devices: for `engine`: devices that share the experts: a number, or `all` of this
        machine; offloaded ones have homes there, and `device_memory` is that of each.
        None: one, or all where one cannot hold the weights.
    Raises:
      MoeEdgeError: bad input.
    """
    check_positive("slo_ttft_ms", slo_ttft_ms)
    check_positive("slo_tpot_ms", slo_tpot_ms)
    offload, devices = resolve_offload(device_memory, offload), check_devices(devices)
    _check(target, load, options, decisions)
    if decisions is not None and target != "replay":
        check_out_file(decisions, run.out_dir)
    if target == "engine":
        from moe_edge.loadtest.in_process import engine_results  # loads JAX

        given = checkpoint or "default", load, options, offload
        results = engine_results(*given, run.dry_run, devices=devices)
    elif target == "computed":
        results = computed_results(checkpoint, load, options, run.dry_run)
    elif target == "replay":
        results = _replay(decisions, run.dry_run)
    else:
        from moe_edge.loadtest.against_url import url_results

        results = url_results(target, _key(api_key_file), load, run.dry_run)
    if results is None:
        return {"target": target}
    for note in results.notes:
        print(note)
    summary = results.summary(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3)
    summary |= {"slo_ttft_ms": slo_ttft_ms, "slo_tpot_ms": slo_tpot_ms}
    print("\n".join(table(summary)))

    def save(folder: Path) -> None:
        write_json(folder / "load.json", {"target": target, **summary})
        write_text(folder / "requests.csv", results.csv())

    files = {}
    if decisions is not None and target != "replay":
        files[decisions] = lambda at: write_decisions(at, results.made, results.lines)
    run.write(save, files)
    return summary


def table(summary: Mapping[str, Any]) -> list[str]:
    """The last line's figures for people."""
    outcomes = ", ".join(f"{n} {name}" for name, n in summary["outcomes"].items())
    lines = [
        f"{summary['requests']} requests, {outcomes or 'none sent'}; "
        f"{summary['throughput_req_s']:.3g} requests/s, "
        f"{summary['output_tokens_per_s']:.4g} tokens/s",
        f"{'ms':24}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p95", "p99")),
    ]
    for key, name in (
        ("ttft_ms", "until the first token"),
        ("tpot_ms", "from token to token"),
        ("e2e_ms", "until the last token"),
    ):
        cells = ("-" if ms is None else f"{ms:.1f}" for ms in summary[key].values())
        lines.append(f"{name:24}" + "".join(f"{cell:>10}" for cell in cells))
    if summary["slo_attainment"] is not None:
        lines.append(
            f"{100 * summary['slo_attainment']:.0f} % of the requests had their first "
            f"token within {summary['slo_ttft_ms']:g} ms and then one every "
            f"{summary['slo_tpot_ms']:g} ms (--slo_ttft_ms, --slo_tpot_ms)"
        )
    return lines


def _check(
    target: str, load: LoadOptions, options: ServingOptions, decisions: str | None
) -> None:
    """Refuses what means nothing to a target."""
    if target == "replay":
        if decisions is None:
            raise ConfigError("--target replay needs --decisions, a file of a load")
        if load.poisson is not None or load.trace is not None:
            raise ConfigError(
                "--target replay has its requests from --decisions; leave out "
                "--poisson and --trace"
            )
        _check_plain(options, "is in the file of --decisions; leave it out")
        return
    if target in TARGETS:
        load.check()
        return
    if "://" not in target:
        raise ConfigError(
            f"--target {target!r}: expected a URL such as http://127.0.0.1:8000, or "
            f"{', '.join(TARGETS)}"
        )
    parse_url(target)
    load.check()
    if decisions is not None:
        raise ConfigError(
            "--decisions are made in the server of a URL; record those of --target "
            "engine or computed"
        )
    _check_plain(
        options,
        "is an option of the server behind a URL; give it to moe-edge serve",
    )


def _check_plain(options: ServingOptions, why: str) -> None:
    """Refuses an option of the engine that was given."""
    for name in changed(options):
        raise ConfigError(f"--{name} {why}")


def _replay(path: str, dry_run: bool) -> Results | None:
    made, lines = read_decisions(path)
    if dry_run:
        return None
    served, differs = replay_decisions(made, lines)
    notes = [differs] if differs else []
    return Results(served=served, is_equal=not differs, notes=notes)


def _key(file: str | None) -> str | None:
    """The server's key; None: it asks for none."""
    if file is not None:
        check_there(file, "--api_key_file")
    key = read_key(file)
    return None if key is None else key.decode()
