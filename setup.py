"""Builds the host kernels, where there is a C++ compiler."""

import runpy
from pathlib import Path

import jax
from setuptools import Extension, setup

FOLDER = Path("moe_edge/kernels/native")
BUILD_ID = runpy.run_path("moe_edge/kernels/build_id.py")["build_id"]()

setup(
    ext_modules=[
        Extension(
            "moe_edge.kernels._native",
            [str(FOLDER / "kernels.cc")],
            depends=[str(path) for path in sorted(FOLDER.iterdir())],
            define_macros=[("MOE_EDGE_BUILD_ID", f'"{BUILD_ID}"')],
            extra_compile_args=[
                *("-std=c++20", "-O3", "-pthread", "-fvisibility=hidden"),
                *("-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wno-psabi"),
                f"-isystem{jax.ffi.include_dir()}",
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,  # without a compiler XLA multiplies
        )
    ]
)
