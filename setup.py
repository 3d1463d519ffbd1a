"""What is in the package; builds the host kernels, where there is a C++ compiler."""

import itertools
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("moe_edge/kernels/native")
CONFIGS = [  # configs/ and its folders as packages without modules
    ".".join(["moe_edge", *path.parts])
    for path in [Path("configs"), *sorted(Path("configs").glob("*/"))]
]
BUILD_ID = runpy.run_path("moe_edge/kernels/build_id.py")["build_id"]()


class BuildAtOnce(build_ext):
    """Compiles the sources of an extension side by side."""

    def build_extensions(self):
        compile_all = self.compiler.compile

        def compile_each(sources, **options):
            with ThreadPoolExecutor() as pool:
                found = pool.map(lambda one: compile_all([one], **options), sources)
                return [*itertools.chain.from_iterable(found)]

        self.compiler.compile = compile_each
        super().build_extensions()


setup(
    # launch/ is for clones alone: a top-level package of this name is ROS 2's.
    packages=[*find_packages(include=["moe_edge*"]), *CONFIGS],
    package_dir={"moe_edge.configs": "configs"},
    cmdclass={"build_ext": BuildAtOnce},
    ext_modules=[
        Extension(
            "moe_edge.kernels._native",
            [str(path) for path in sorted(FOLDER.glob("*.cc"))],
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
    ],
)
