"""Makes JAX strict for every test: no silent broadcasting, promotion or device.

Tests run on the CPU, also where there is a GPU; `JAX_PLATFORMS=cuda pytest` (with the
paths of docs/gpu_todo.md) asks for the GPU.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before JAX starts: several CPU devices, so that device mix-ups can show.
_FLAG = "--xla_force_host_platform_device_count=4"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
