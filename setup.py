"""Maps the top-level folders to their import names; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("kernels", "db", "workloads")

packages = find_packages(include=["tunebench", "tunebench.*"], exclude=[f"tunebench.{f}*" for f in FOLDERS])
for folder in FOLDERS:
    packages += [f"tunebench.{folder}", *(f"tunebench.{folder}.{p}" for p in find_packages(folder))]

setup(
    packages=packages,
    package_dir={"tunebench": "tunebench", **{f"tunebench.{folder}": folder for folder in FOLDERS}},
)
