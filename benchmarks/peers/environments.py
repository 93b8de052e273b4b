"""Virtual environments for the libraries, made once and kept.

Each library has its own, from its file in ``requirements/``. PyTorch is large: libraries on the
same Python share one installation of it, which a ``.pth`` file puts on their path. Nothing is
shared with the environment that the benchmark is started from.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"


@dataclass(frozen=True)
class Environment:
    """What a library needs.

    Attributes:
        name: Its file in ``requirements/``.
        package: Its name on PyPI.
        torch: Whether it shares PyTorch.
        pythons: Versions of Python that it runs on, the best first; none means the current one.
    """

    name: str
    package: str
    torch: bool = True
    pythons: tuple[str, ...] = ()


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("pfl", "pfl"),
        Environment("fluke", "fluke-fl"),
        Environment("flower", "flwr"),
        Environment("blazefl", "blazefl", pythons=("3.14", "3.13", "3.12")),
        Environment("fedjax", "fedjax", torch=False),
    )
}


class InstallError(Exception):
    """A library can't be installed; the message is one line that says why."""


def python_of(environment: Environment, folder: Path) -> Path:
    """Return the interpreter of an environment in ``folder``, which is made if it isn't there."""
    base = _find_python(environment.pythons)
    if not environment.torch:
        return _make(folder / environment.name, base, environment.name)
    shared = _make(folder / f"torch-{_run(base, '-c', _VERSION)}", base, "torch")
    packages = _run(shared, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    return _make(folder / environment.name, base, environment.name, packages)


def version_of(environment: Environment, folder: Path) -> str:
    """Return the name and the version of the library that is installed, and of its Python."""
    python, package = folder / environment.name / "bin" / "python", environment.package
    if not python.is_file():
        return f"{package}: not installed"
    ask = f"from importlib.metadata import version; print(version('{package}'))"
    return f"{package} {_run(python, '-c', ask)} (Python {_run(python, '-c', _VERSION)})"


_VERSION = "import sys; print('.'.join(map(str, sys.version_info[:2])))"


def _make(path: Path, base: Path, requirements: str, packages: str | None = None) -> Path:
    wanted = (REQUIREMENTS / f"{requirements}.txt").read_text()
    python, done = path / "bin" / "python", path / "installed.txt"
    if done.is_file() and done.read_text() == wanted:
        return python
    shutil.rmtree(path, ignore_errors=True)
    _run(base, "-m", "venv", path)
    if packages is not None:
        site = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        Path(site, "torch.pth").write_text(packages)
    _run(python, "-m", "pip", "install", "-q", "-r", REQUIREMENTS / f"{requirements}.txt")
    done.write_text(wanted)
    return python


def _find_python(versions: Iterable[str]) -> Path:
    """Return the first interpreter that starts: on the path, or one of pyenv's."""
    versions = tuple(versions)
    if not versions:
        return Path(sys.executable)
    for version in versions:
        candidates = [Path(found)] if (found := shutil.which(f"python{version}")) else []
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
        candidates += sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
        for candidate in candidates:
            if subprocess.run([candidate, "-V"], capture_output=True).returncode == 0:
                return candidate
    raise InstallError(f"needs Python {' or '.join(versions)}")


def _run(*command: str | Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else done.stderr.strip().split("\n")[-1]
        raise InstallError(f"not installed: {reason}")
    return done.stdout.strip()
