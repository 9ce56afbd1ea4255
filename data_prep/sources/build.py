"""What a source is, and which one a `KIND:URI` on the command line means."""

import os
from dataclasses import dataclass, field
from typing import Protocol

from vitscale.config.errors import UserError

KINDS = ("imagefolder", "idx", "digits")


@dataclass
class Listing:
    """All inputs of a source; the lists run in parallel."""

    # index = label
    classes: list[str]
    # unique in the source; may hold lone surrogates for bytes that are not UTF-8
    names: list[str] = field(default_factory=list)
    # expected size of each input, for balancing shards and as a part of the plan
    num_bytes: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    # position -> why an input that was listed cannot even be read
    problems: dict[int, str] = field(default_factory=dict)

    def add(self, name: str, num_bytes: int, label: int, problem: str = "") -> None:
        """Append one input."""
        if problem:
            self.problems[len(self.names)] = problem
        self.names.append(name)
        self.num_bytes.append(num_bytes)
        self.labels.append(label)


class Source(Protocol):
    """Where labelled images come from. Objects are small: every rank builds its own."""

    kind: str

    def listing(self) -> Listing:
        """List all inputs in an order that depends on their names alone."""

    def read(self, name: str, num_bytes: int) -> bytes:
        """Give the encoded image of one input, which was listed with that size."""


def build_source(spec: str, split: str) -> Source:
    """Make the source behind a command-line argument.

    Args:
        spec: KIND:URI, see `vitscale pack --help`.
        split: The split that is packed; sources that hold several choose by it.

    Raises:
        UserError: The kind is unknown or the URI does not fit it.
    """
    kind, mark, uri = spec.partition(":")
    if kind not in KINDS or not mark:
        raise UserError(f"source {spec!r}: write KIND:URI with KIND one of {', '.join(KINDS)}")
    if not uri:
        raise UserError(
            f"source {spec!r}: nothing after the colon; write for example {kind}:{_EXAMPLE[kind]}"
        )
    if kind == "imagefolder":
        from data_prep.sources.imagefolder import ImageFolder

        return ImageFolder(os.path.expanduser(uri.removeprefix("file://")))
    if kind == "idx":
        from data_prep.sources.idx import IdxFolder

        return IdxFolder(os.path.expanduser(uri.removeprefix("file://")), split)
    from data_prep.sources.digits import Digits

    return Digits(uri)


_EXAMPLE = {"imagefolder": "/data/flowers/train", "idx": "/data/fashion-mnist", "digits": "train"}


def printable(name: str) -> str:
    r"""Write a file name as valid text from which its bytes can be recovered.

    Bytes that are not UTF-8 become \xNN, and a backslash becomes two; all else stays.
    """
    if "\\" not in name and name.isprintable():
        return name
    doubled = name.replace("\\", "\\\\")
    return os.fsencode(doubled).decode("utf-8", "backslashreplace")
