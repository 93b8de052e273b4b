"""What the source of a class says of its options is what the parser of a run accepts."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest
from lightning.pytorch.cli import LightningArgumentParser

from pflight import Federation
from pflight.command.signatures import Source, exported, find

PACKAGES = ("pflight.callbacks", "pflight.datamodules", "pflight.models")
OTHERS = ("torch.optim", "lightning.pytorch.callbacks", "lightning.pytorch.loggers")


def accepted(kind: type) -> set[str]:
    """Return the options of a class as the parser of a run knows them."""
    parser = LightningArgumentParser()
    parser.add_class_arguments(kind)
    return set(vars(parser.get_defaults()))


def imported(source: Source) -> type:
    return getattr(import_module(source.module), source.name)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_options_of_own_classes_are_known(package: str) -> None:
    sources = [
        one for one in exported(package) if one.path != "pflight.data.loaders.Visit"
    ]  # a tuple
    assert {one.name for one in sources} <= set(import_module(package).__all__)
    assert len(sources) > 10
    for source in sources:
        assert source.options is not None, source
        found = accepted(imported(source))  # nothing for base classes with a __new__
        assert set(source.options) == (found or set(source.options)), source


@pytest.mark.parametrize("package", OTHERS)
def test_no_option_of_other_classes_is_missed(package: str) -> None:
    known = [one for one in exported(package) if one.options is not None]
    assert len(known) > 5 - 3 * package.endswith("loggers")
    for source in known:
        assert accepted(imported(source)) <= set(source.options or ()), source


def test_names_are_found_where_they_are_defined() -> None:
    federation = find("pflight.Federation")
    assert federation is not None
    assert federation.path == "pflight.federation.Federation"
    assert len(federation.summary) > 20
    assert str(Federation.__doc__).startswith(federation.summary)
    former = find("pflight.callbacks.FedCluster")
    assert former is not None
    assert former.name == "CFL"
    trainer = find("lightning.Trainer")
    assert trainer is not None
    assert {"max_epochs", "callbacks"} <= set(trainer.options or ())
    assert "ckpt_path" in trainer.arguments("fit")
    for path in ("json.JSONDecoder", "pflight.Nothing", "pflight", "torch.nn.functional.relu", ""):
        assert find(path) is None


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("class A:\n def __init__(self, a, *, b=1): ...", ["a", "b"]),
        ("@dataclass(frozen=True)\nclass A:\n a: int\n b: int = 2", ["a", "b"]),
        ("class A(Generic[T], ABC): ...", None),
        ("class A:\n def __init__(self, a, **more): self.more = more", None),
        ("class A:\n def __init__(self, a, *more): ...", None),
        ("@registered\nclass A:\n def __init__(self, a): ...", None),
        ("class A(B):\n def __init__(self, a, **more):\n  super().__init__(b=a, **more)", None),
    ],
)
def test_what_the_source_leaves_open_is_open(text: str, options: list[str] | None) -> None:
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.ClassDef)
    assert Source("nowhere", node).options == options
