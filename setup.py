"""What pyproject.toml can't say: the page of a package index, and equal archives of equal files."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import time
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent


def long_description() -> str:
    """Return README.md with absolute addresses: those of the release's tag."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    repository, tag = project["urls"]["Source"], f"v{project['version']}"
    raw = repository.replace("//github.com/", "//raw.githubusercontent.com/")
    text = (ROOT / "README.md").read_text("utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\g<1>{raw}/{tag}/", text)
    return re.sub(r"(\]\()(?!https?:)", rf"\g<1>{repository}/blob/{tag}/", text)


class Sdist(sdist):
    """Makes the archive of the sources.

    setuptools writes the clock, and the times, permissions and owners of files. Here these depend
    on ``SOURCE_DATE_EPOCH`` alone, the seconds that builds in other places share.
    """

    def make_archive(self, base_name: str, *_: object, base_dir: str, **__: object) -> str:
        """Write a .tar.gz of a folder, and return its path."""
        now = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))

        def same(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.mtime, entry.mode = now, 0o755 if entry.mode & 0o100 else 0o644
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            return entry

        path = f"{base_name}.tar.gz"
        with (
            gzip.GzipFile(path, "wb", mtime=now) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            archive.add(base_dir, filter=same)
        return path


if __name__ == "__main__":
    os.umask(0o022)  # a wheel has the permissions of its files
    setup(
        long_description=long_description(),
        long_description_content_type="text/markdown",
        cmdclass={"sdist": Sdist},
    )
