"""What is in the package; builds the host kernels, where there is a C++ compiler."""

import hashlib
import itertools
import os
import runpy
import shutil
import subprocess
import sys
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


READ_BY_COMPILERS = "CPATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX"


def _version(compiler) -> str:
    """What a compiler says that it is; empty where it cannot be asked."""
    command = getattr(compiler, "compiler_so_cxx", None) or compiler.compiler_so
    asked = [*command[:1], "--version"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout


class BuildAtOnce(build_ext):
    """Compiles the sources of an extension side by side.

    With MOE_EDGE_OBJECTS=FOLDER, builds of the same sources by the same compiler share
    the objects there, also builds at once: one of them compiles a source.
    """

    def build_extensions(self):
        compile_all = self.compiler.compile
        objects = os.environ.get("MOE_EDGE_OBJECTS")

        def compile_each(sources, **options):
            def compile_one(source):
                return compile_all([source], **options)

            def shared(source):
                return [compile_once(Path(objects), said, source, compile_one)]

            said = Path(__file__).read_text(), BUILD_ID, jax.__version__, sys.version
            names = "compiler_so", "compiler_so_cxx"
            said += tuple(getattr(self.compiler, name, None) for name in names)
            # Macros and flags, also a command line's. Folders are others in each build
            # and environment; JAX's version is in `said`.
            asked = {n: v for n, v in options.items() if n != "output_dir"}
            flags = repr(asked).replace(jax.ffi.include_dir(), "")
            said += flags, repr(self.compiler.macros)
            said += tuple(os.environ.get(name) for name in READ_BY_COMPILERS)
            said += (_version(self.compiler),)
            with ThreadPoolExecutor() as pool:
                found = pool.map(shared if objects else compile_one, sources)
                return [*itertools.chain.from_iterable(found)]

        self.compiler.compile = compile_each
        # Shared objects may be older than what was linked of others here before.
        self.compiler.force = True
        super().build_extensions()


def compile_once(folder: Path, said: tuple, source: str, compile_one) -> str:
    """Path of a source's object in a folder, compiled if it is not there."""
    import fcntl  # not on Windows, where nothing is shared

    name = hashlib.sha256(repr((said, Path(source).name)).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{Path(source).stem}-{name}.o"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            (made,) = compile_one(source)
            partial = path.with_suffix(".partial")
            shutil.copyfile(made, partial)
            partial.rename(path)
    return str(path)


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
                "-g0",  # Python asks for -g: a third of the time, most of the bytes
                *("-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wno-psabi"),
                f"-isystem{jax.ffi.include_dir()}",
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,  # without a compiler XLA multiplies
        )
    ],
)
