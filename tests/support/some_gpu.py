"""Lowering for a GPU where there is none."""

import contextlib

import jax


def on_some_gpu():
    """JAX 0.11 asks which GPU it lowers for."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
