"""Run checks with the lowest and with the newest versions of all dependencies.

    python benchmarks/versions.py                          # both: the short check's tests
    python benchmarks/versions.py lowest --run "./check fast"
    python benchmarks/versions.py newest --python 3.13 --run "pytest -q tests/test_cli.py"

Each environment is made by uv, from this checkout and all extras of ``pyproject.toml``. ``lowest``
takes the lower bound of every dependency that is named there, and the newest versions of their
own dependencies. Such pairs raise warnings about what is deprecated, which are then no errors.
Environments take some 6 GB and are removed at the end, except with ``--keep FOLDER``. Where
``pyproject.toml`` has an upper bound, this tries the newest release of a package all the same:

    python benchmarks/versions.py newest --unbounded flwr --run "pytest tests/deploy"
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
SHORT = "./check package doctests tests"
DEPRECATED = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")


def extras() -> str:
    """Return the names of all extras, with commas."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return ",".join(project["optional-dependencies"])


def make(folder: Path, versions: str, python: str, unbounded: list[str]) -> None:
    """Make an environment with pflight and all its extras, and print what is in it."""
    subprocess.run(["uv", "venv", "--quiet", "--seed", "--python", python, folder], check=True)
    install = ["uv", "pip", "install", "--quiet", "--python", folder / "bin" / "python"]
    install += ["--resolution", RESOLUTIONS[versions], "--editable", f"{ROOT}[{extras()}]"]
    with NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(unbounded))
        file.flush()
        subprocess.run([*install, "--overrides", file.name], check=True)
    listed = ["uv", "pip", "freeze", "--python", folder / "bin" / "python"]
    subprocess.run(listed, check=True)


def run(folder: Path, versions: str, command: str) -> int:
    """Run a command in this checkout with an environment, and return its exit status."""
    changes = {"VIRTUAL_ENV": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    if versions == "lowest":
        changes["PYTEST_ADDOPTS"] = " ".join(f"-W default::{one}" for one in DEPRECATED)
    print(f"\n{versions}: {command}", flush=True)
    return subprocess.run(shlex.split(command), cwd=ROOT, env=os.environ | changes).returncode


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("versions", nargs="?", choices=RESOLUTIONS)
    options.add_argument("--python", default="3.11", metavar="VERSION")
    options.add_argument("--run", default=SHORT, metavar="COMMAND")
    options.add_argument("--keep", type=Path, metavar="FOLDER")
    options.add_argument("--unbounded", nargs="+", default=[], metavar="PACKAGE")
    given = options.parse_args()
    failed = []
    for versions in [given.versions] if given.versions else RESOLUTIONS:
        with TemporaryDirectory(prefix=f"pflight-{versions}-") as place:
            folder = (given.keep.resolve() if given.keep else Path(place)) / versions
            if not (folder / "bin" / "python").exists():
                make(folder, versions, given.python, given.unbounded)
            if run(folder, versions, given.run):
                failed.append(versions)
    if failed:
        sys.exit(f"failed with the {' and the '.join(failed)} versions: {given.run}")


if __name__ == "__main__":
    main()
