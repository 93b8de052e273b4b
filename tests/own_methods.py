"""The methods that the page on methods of one's own shows, as modules."""

from tests.pages import ROOT, modules

_shown = modules(ROOT / "docs" / "own-methods.md")
MyFedDyn = _shown["my_feddyn"].MyFedDyn
MyFedBABU = _shown["my_fedbabu"].MyFedBABU
Halfway = _shown["halfway"].Halfway
Scaled = _shown["scaled"].Scaled
CarefulFedAvg = _shown["careful"].CarefulFedAvg
