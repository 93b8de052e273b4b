"""The methods that the page on methods of one's own shows, as modules."""

from tests.pages import ROOT, modules

_shown = modules(ROOT / "docs" / "own-methods.md")
FedDyn = _shown["feddyn"].FedDyn
FedBABU = _shown["fedbabu"].FedBABU
Halfway = _shown["halfway"].Halfway
Scaled = _shown["scaled"].Scaled
