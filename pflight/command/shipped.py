"""The configurations that ship with pflight."""

from __future__ import annotations

import functools
import os
import re
from contextlib import suppress
from importlib.resources import files
from pathlib import Path, PurePosixPath

from pflight.messages import closest, question

_FORMER = {"fedcluster": "cfl", "hypocluster": "ifca", "robust": "trimmed_kmeans"}


@functools.cache
def configs() -> dict[str, Path]:
    """Return the files by their paths for ``--config``, such as ``configs/quickstart.yaml``."""
    folder = Path(str(files("pflight.configs")))
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.yaml")}
    names = sorted(found, key=lambda name: (name.count("/"), name))  # folders last
    return {f"configs/{name}": found[name] for name in names}


def summary(config: Path) -> str:
    """Return the first sentence of the comment at the top of a configuration."""
    lines = re.match(r"(?:#.*\n)*", config.read_text("utf-8"))
    text = " ".join(line.strip("# ") for line in lines[0].splitlines()) if lines else ""
    return re.split(r"(?<=[.?!]) ", text)[0]


def find_config(path: str) -> str | None:
    """Return the file for ``--config``: the path itself, or else a shipped configuration."""
    if os.path.exists(path):
        return path
    name = path.removeprefix("configs/")
    for former, current in _FORMER.items():
        name = name.replace(f"algorithm/{former}.yaml", f"algorithm/{current}.yaml")
    with suppress(OSError):  # the name may be too long
        shipped = files("pflight.configs").joinpath(name)
        if shipped.is_file():
            return str(shipped)
    return None


def no_config(path: str) -> str:
    """Return a message that a file does not exist, with a similar local or shipped one."""
    beside: list[str] = []
    with suppress(OSError):
        beside = [str(one) for one in Path(path).parent.glob("*.y*ml")]
    by_name = {PurePosixPath(known).stem: known for known in configs()}
    meant = closest(path, [*beside, *configs()])
    meant = meant or [by_name[stem] for stem in closest(PurePosixPath(path).stem, by_name)]
    end = question(meant) or ", and pflight ships none like it"
    return f"there is no config file {path!r}{end}"
