"""The root of `moe-edge profile_machine`: this machine as a preset."""

from typing import Any

from moe_edge.core.checks import check_count
from moe_edge.core.files import write_json
from moe_edge.core.run_folder import RunFolder, root


@root
def run_profile_machine(
    run: RunFolder,
    *,
    checkpoint: str = "",
    max_batch: int = 8,
    name: str = "this_machine",
    d_model: int = 2048,
    expert_dim: int = 1408,
    dtype: str = "",
    copies: int = 4,
    most_tokens: int = 256,
    repeats: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Measures block compute, copies and memory of the default JAX device.

    Args:
      run: folder of `machine.json` (by its path a preset: a cluster of such
        machines, or a GPU in `cluster_options`) and `config.gin`.
      checkpoint: model whose steps are timed too, for schedulers that ask what a step
        costs (`step_costs`); empty for none.
      max_batch: most rows of its steps.
      name: given to the device.
      d_model: width of the expert block that is timed.
      expert_dim: its neurons.
      copies: blocks that take turns, so that none stays in a processor's cache.
      most_tokens: largest batch.
      repeats: rounds behind each median.
      dtype: float32 or bfloat16; empty for float32 on CPU, else bfloat16.
      seed: of the weights.
    Raises:
      ConfigError: bad input; OutputError: `out_dir` cannot be written.
    """
    given = dict(locals())
    check_count("max_batch", max_batch)
    for other in ("run", "checkpoint", "max_batch"):
        del given[other]
    if checkpoint:
        from moe_edge.engine.load import check_checkpoint

        check_checkpoint(checkpoint, with_tokenizer=False)
    import jax  # only now: a refused value should not wait for it

    from moe_edge.hardware.calibrate import calibrate

    if not dtype:
        given["dtype"] = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if run.dry_run:
        return {"dtype": given["dtype"]}
    measured = calibrate(**given)
    stored, steps = measured.to_json(), {}
    if checkpoint:
        steps = _steps(checkpoint, max_batch, repeats, seed)
        stored["step_costs"] = {"checkpoint": checkpoint, **steps}
    run.write(lambda folder: write_json(folder / "machine.json", stored))
    device, link = measured.gpu.device, measured.gpu.host_link
    print("time of one expert by tokens: measured, and by the fitted cost model")
    print(f"{'tokens':>8}{'measured ms':>13}{'fitted ms':>11}")
    for tokens, seen, fitted in measured.rows:
        print(f"{tokens:8}{1e3 * seen:13.3f}{1e3 * fitted:11.3f}")
    if measured.warning:
        print(f"warning: {measured.warning}")
    return {
        "flops_per_s": device.flops_per_s,
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "call_s": device.call_s,
        "host_bytes_per_s": link.bytes_per_s,
        "host_latency_s": link.latency_s,
        "copy_bytes_per_s": measured.copy_bytes_per_s,
        "worst_error": measured.worst_error,
        "warning": measured.warning,
        **{name: value for name, value in steps.items() if name.endswith("_error")},
    }


def _steps(checkpoint: str, max_batch: int, repeats: int, seed: int) -> dict[str, Any]:
    """`step_costs` of machine.json."""
    from moe_edge.engine.load import load_engine
    from moe_edge.profile.step_costs import measure_steps

    engine = load_engine(checkpoint, with_tokenizer=False).engine
    with engine:
        found = measure_steps(engine, max_batch=max_batch, repeats=repeats, seed=seed)
    for point in found.held_out:
        print(
            f"{point.kind:>8}{point.size:5} at K {point.k:5.1f}"
            f"{1e3 * point.measured_s:9.3f} ms, by the table {1e3 * point.fitted_s:.3f}"
        )
    return found.to_json()
