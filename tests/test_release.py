"""What a release tells the world agrees with the project."""

from __future__ import annotations

import re
import runpy
import tomllib
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.pages import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = "https://github.com/pflight/pflight"
CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base", "xxhash": "python-xxhash"}
"""By name on PyPI, packages that conda-forge names differently."""
LINK = re.compile(r"(!?)\[[^]]*\]\(([^)\s]+)\)")


def test_the_long_description_is_the_readme_with_absolute_addresses() -> None:
    readme = (ROOT / "README.md").read_text()
    long_description = runpy.run_path(str(ROOT / "setup.py"))["long_description"]()
    raw, pages = (
        f"{home}v{PROJECT['version']}/"
        for home in ("https://raw.githubusercontent.com/pflight/pflight/", f"{HOME}/blob/")
    )
    given, found = LINK.findall(readme), LINK.findall(long_description)
    assert len(found) == len(given) > 20
    for (picture, link), (also, address) in zip(given, found, strict=True):
        home = raw if picture else pages
        assert (also, address) == (picture, link if link.startswith("https:") else home + link)
        assert link.startswith("https:") or (ROOT / link.partition("#")[0]).is_file()
    assert LINK.sub("", long_description) == LINK.sub("", readme)


def test_the_addresses_are_those_of_the_project() -> None:
    assert PROJECT["urls"]["Source"] == HOME
    for name in ("Documentation", "Changelog"):
        assert (ROOT / PROJECT["urls"][name].removeprefix(f"{HOME}/blob/main/")).is_file()
    for name in ("CITATION.cff", "mkdocs.yml", "recipe/recipe.yaml", "SECURITY.md"):
        assert HOME in (ROOT / name).read_text()


def test_versions_of_python_are_those_that_are_tested() -> None:
    prefix = "Programming Language :: Python :: 3."
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if one.startswith(prefix)]
    workflow = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    assert workflow["jobs"]["check"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["requires-python"] == f">={named[0]}"
    for page in ("README.md", "docs/index.md"):
        assert f"tested with {', '.join(named[:-1])} and {named[-1]}" in (ROOT / page).read_text()


def test_the_citation_has_the_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])


def test_the_conda_recipe_has_the_dependencies_and_their_bounds() -> None:
    recipe = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text())
    assert recipe["context"]["version"] == PROJECT["version"]
    run = dict(f"{line} ".split(" ", 1) for line in recipe["requirements"]["run"])
    assert run.pop("python").strip() == PROJECT["requires-python"]
    for one in map(Requirement, PROJECT["dependencies"]):
        assert SpecifierSet(run.pop(CONDA.get(one.name, one.name))) == one.specifier
    assert {*run} == {"docstring_parser", "typeshed-client"}  # of jsonargparse[signatures]
