"""Reasons why clients can't be stacked, in words for users without knowledge of stacking."""

from __future__ import annotations

import re

from pflight.errors import described, said_by

DRAWS = "it draws random numbers while it trains, as dropout does unless its rate is 0"


def failure(what: str, error: Exception) -> str:
    """Return why clients failed, with the failed part unless the reason names it."""
    reason = reason_of(error)
    return reason if reason.startswith(("it ", "its ")) else f"{what}: {reason}"


def reason_of(error: BaseException) -> str:
    """Return an error's first sentence, in words for users without knowledge of stacking."""
    line = said_by(error).split("\n")[0].split(". ")[0]
    if not line or isinstance(error, LookupError):  # the message is only a key
        line = described(error)
    if "meta tensors" in line:  # shared code gets clients' scalars as such
        return "it asks for the value of num_samples or another number that clients differ in"
    if "calling .item()" in line or "data-dependent" in line:
        return "it branches on values or takes a number out of a tensor, as F.one_hot does"
    if "data pointer" in line:
        return "it takes values out of a tensor, as numpy() does"
    if "dynamic shape" in line:
        return "it makes tensors whose shape depends on values, as masks do"
    if "randomness" in line:
        return DRAWS
    if "out= or view" in line:
        return "it writes the result of an operation into a tensor (out=), as spectral_norm does"
    if "attention" in line:
        return f"{line} (Hugging Face's models take attn_implementation='eager')"
    if missing := re.search(r"(?:[Bb]atching rule|not yet support).* aten::(\w+)", line):
        recurrent = re.search(r"rnn|lstm|gru", missing[1])
        return f"vmap can't do {missing[1]}" + (", of recurrent layers" if recurrent else "")
    return line
