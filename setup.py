"""Lists the packages, which pyproject.toml cannot do here: ``passes/`` is installed as ``glue_compiler.passes``."""

from setuptools import find_packages, setup

PASSES = "glue_compiler.passes"

setup(
    packages=[
        *find_packages(include=["glue_compiler", "glue_compiler.*"]),
        PASSES,
        *(f"{PASSES}.{name}" for name in find_packages("passes")),
    ]
)
