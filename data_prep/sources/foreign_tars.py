"""Images in WebDataset shards that somebody else wrote.

A sample is all members of one tar whose names are the same up to the first dot of the last part:
`part/000017.jpg`, `part/000017.cls`, `part/000017.json`. That is webdataset's own rule, but no
order of the members is asked for, and what webdataset leaves out in silence gets a reason. Where
keys themselves hold dots (`a.1.jpg`, `a.1.cls`, `a.2.jpg`, `a.2.cls`), each part that has an image
and a label of its own is a sample.

The image is the first of IMAGE_EXTENSIONS. The label is the content of `.cls`, a number in `.txt`,
or the field "label" in `.json`; with --label-column, members or fields of these names.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from data_prep.sources.build import Column, Entry, LabelValue, SourceOptions, printable
from data_prep.sources.files import FoundFile, RandomFile, find_files, with_prefixes
from data_prep.sources.tar_files import TarFiles, UniqueNames, block_of, member_entry, with_links
from data_prep.sources.tar_scan import TAR_ENDINGS, TarMember, forward, scan_tar
from vitscale.config.errors import DataError

# In the order of preference where a sample has several, such as a picture and its mask.
IMAGE_EXTENSIONS = (
    "jpg", "jpeg", "jpe", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "pbm", "pnm",
    "jp2", "avif", "heic", "img", "image",
)  # fmt: skip
DEFAULT_COLUMN = "label"
# Of a member with labels.
MAX_FIELD_BYTES = 1 << 20
# webdataset's own members. Source: webdataset.tariterators.tar_file_iterator.
_META = re.compile(r"__[^/]*__($|/)")
_PLAIN = ("cls", "txt")
_RANKS = {extension: rank for rank, extension in enumerate(IMAGE_EXTENSIONS)}


class ForeignSample(NamedTuple):
    """One sample of a tar."""

    key: str
    # the member with the image; None where there is none
    image: TarMember | None
    # of that member: "jpg"; with dots where it has several
    extension: str
    # one for each label column
    labels: tuple[LabelValue, ...]
    # why it cannot be packed, "WORD: detail"; else empty
    problem: str


class ForeignTars:
    """Images in foreign WebDataset shards, compressed or not.

    Args:
        uri: The shards, as `find_files` takes them.
        options: label_columns.
    """

    kind = "webdataset"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._uri, self._names = uri, options.label_columns
        self._tars = TarFiles()
        self._multi = [False] * max(1, len(self._names))

    def entries(self) -> Iterator[Entry]:
        """List all samples; those of one tar are held in memory.

        Raises:
            UserError: There is no such file.
            DataError: A tar is damaged.
        """
        for found, prefix in with_prefixes(find_files(self._uri, TAR_ENDINGS)):
            file = RandomFile(found.uri)
            block = block_of(file)
            unique = UniqueNames()
            for sample in scan_samples(file, self._names):
                for at, label in enumerate(sample.labels):
                    # An empty tuple may also be a label that is missing.
                    self._multi[at] |= isinstance(label, tuple) and len(label) > 0
                name = prefix + unique.name(sample.key)
                yield _entry(found, sample, name, block)

    def columns(self) -> list[Column]:
        """Give the label columns; those with a list of labels anywhere are multi-label."""
        names = self._names or (DEFAULT_COLUMN,)
        return [Column(name, multi) for name, multi in zip(names, self._multi, strict=True)]

    def read(self, entry: Entry) -> bytes:
        """Read one image."""
        return self._tars.read(entry)


def scan_samples(file: RandomFile, label_columns: Sequence[str] = ()) -> Iterator[ForeignSample]:
    """Give the samples of a WebDataset tar in the order in which they begin.

    Args:
        file: The tar, compressed or not.
        label_columns: Members (by extension) or fields of JSON members with labels; empty finds
            the one there is.

    Raises:
        DataError: The tar is damaged; the message says how many samples are before it.
    """
    from webdataset.tariterators import base_plus_ext

    samples: dict[str, _Members] = {}
    names = tuple(label_columns)

    def wanted(name: str, num_bytes: int) -> bool:
        extension = name.lower().rpartition(".")[2]
        return num_bytes <= MAX_FIELD_BYTES and _is_field(extension, names)

    def scan() -> Iterator[TarMember]:
        return scan_tar(forward(file), wanted=wanted)

    try:
        for member in with_links(scan):
            if _META.match(member.name):
                continue
            key, extension = base_plus_ext(member.name)
            if key is None:
                key, extension = member.name, ""
            own = samples.setdefault(key, _Members(key, names))
            own.add(extension.lower(), member)
    except DataError as error:
        whole = sum(not sample.problem for own in samples.values() for sample in own.samples())
        raise DataError(f"{error}; whole samples before that: {whole}") from error
    for own in samples.values():
        yield from own.samples()


class _Members:
    """The members of one tar that webdataset takes for one sample.

    Args:
        key: What their names have in common.
        names: Of the label columns; empty for the default.
    """

    # There are as many of these as samples in a tar.
    __slots__ = ("_again", "_fields", "_first", "_key", "_names")

    def __init__(self, key: str, names: tuple[str, ...]) -> None:
        self._key, self._names = key, names
        # extension -> first member of that name, and those that come again
        self._first: dict[str, TarMember] = {}
        self._again: list[tuple[str, TarMember]] = []
        # extension -> text, or the fields of JSON
        self._fields: dict[str, Any] = {}

    def add(self, extension: str, member: TarMember) -> None:
        """Add a member; of its content only labels are kept."""
        if extension in self._first:
            self._again.append((extension, member._replace(content=None)))
            return
        self._first[extension] = member._replace(content=None)
        if member.content is not None:
            is_json = extension.rpartition(".")[2] == "json"
            self._fields[extension] = (
                _json_fields(member.content, self._names)
                if is_json
                else member.content.decode("utf-8", "surrogateescape").strip()
            )

    def samples(self) -> Iterator[ForeignSample]:
        """Give the sample, or several where dots belong to keys, or members come again."""
        images = [extension for extension in self._first if _rank(extension) is not None]
        prefixes = {_split(extension)[0] for extension in images}
        if len(prefixes) > 1 and all(not self._labels(prefix)[1] for prefix in prefixes):
            fields = {_split(e)[0] for e in self._first if _is_field(_split(e)[1], self._names)}
            for prefix in sorted(prefixes | fields):
                key = f"{self._key}.{prefix}" if prefix else self._key
                own = [extension for extension in images if _split(extension)[0] == prefix]
                yield self._sample(key, own, prefix)
        else:
            # What has no prefix is preferred, as an image and as a label.
            plain = [extension for extension in images if "." not in extension] or images
            prefix = next(iter(prefixes)) if len(prefixes) == 1 else ""
            yield self._sample(self._key, plain, prefix if self._labels("")[1] else "")
        for extension, member in self._again:
            # A row for each picture, so that none is lost.
            if _rank(extension) is not None:
                labels = tuple(() for _ in self._names or (DEFAULT_COLUMN,))
                yield ForeignSample(self._key, member, extension, labels, self._duplicate())

    def _sample(self, key: str, images: list[str], prefix: str) -> ForeignSample:
        labels, problem = self._labels(prefix)
        images = sorted(images, key=lambda extension: (_rank(extension), extension))
        image = self._first[images[0]] if images else None
        if self._again:
            problem = self._duplicate()
        elif image is None:
            found = ", ".join(sorted(self._first))
            problem = f"incomplete_sample: no image, only {found or 'a name without extension'}"
        elif len({_split(extension)[0] for extension in images}) > 1:
            problem = f"incomplete_sample: several images, {', '.join(images)}; which is it?"
        return ForeignSample(key, image, images[0] if images else "", labels, problem)

    def _duplicate(self) -> str:
        extensions = sorted({extension for extension, _ in self._again})
        return f"duplicate: key {printable(self._key)} has more than one {', '.join(extensions)}"

    def _labels(self, prefix: str) -> tuple[tuple[LabelValue, ...], str]:
        """Give the labels in all columns, and why one is missing."""
        start = f"{prefix}." if prefix else ""
        problems = []
        labels = []
        for name in self._names or (DEFAULT_COLUMN,):
            found, value = self._raw(start, name)
            label: LabelValue = ()
            if not found:
                problems.append(f"incomplete_sample: no label {name!r}")
            elif (checked := _checked(value)) is None:
                problems.append(f"bad_label: {name!r} is {value!r:.80}")
            else:
                label = checked
            labels.append(label)
        return tuple(labels), problems[0] if problems else ""

    def _raw(self, start: str, name: str) -> tuple[bool, Any]:
        """Give whether there is such a label, and what it is before any check."""
        extensions = (name,) if self._names else _PLAIN
        for extension in extensions:
            text = self._fields.get(start + extension)
            if text is not None and (self._names or extension == "cls" or _is_number(text)):
                return bool(text), int(text) if _is_number(text) else text
        fields = self._fields.get(f"{start}json", {})
        return name in fields, fields.get(name)


def _is_field(extension: str, names: tuple[str, ...]) -> bool:
    return extension == "json" or extension in (names or _PLAIN)


def _split(extension: str) -> tuple[str, str]:
    """Split "1.jpg" into "1" and "jpg"."""
    prefix, _, last = extension.rpartition(".")
    return prefix, last


def _rank(extension: str) -> int | None:
    """Give the place of an image's extension in the order of preference."""
    return _RANKS.get(_split(extension)[1])


def _json_fields(content: bytes, names: tuple[str, ...]) -> dict[str, Any]:
    """Give the label fields of a JSON member; of a damaged one all, as something no label can be.

    A field that is null is none.
    """
    names = names or (DEFAULT_COLUMN,)
    try:
        value = json.loads(content)
    except ValueError:
        return {name: {"no valid JSON": None} for name in names}
    if not isinstance(value, dict):
        return {name: {"no JSON object": None} for name in names}
    return {name: value[name] for name in names if value.get(name) is not None}


def _is_number(text: str) -> bool:
    return re.fullmatch("[+-]?[0-9]+", text) is not None


def _checked(value: Any) -> LabelValue | None:
    """Give a label that is a class, its number, or a list of them; None is none of these."""
    if isinstance(value, list):
        parts = tuple(value)
        return parts if all(_is_class(part) for part in parts) else None
    return value if _is_class(value) else None


def _is_class(value: Any) -> bool:
    return (type(value) is int and value >= 0) or (isinstance(value, str) and value != "")


def _entry(found: FoundFile, sample: ForeignSample, name: str, block: str) -> Entry:
    if sample.image is None:
        return Entry(name, 0, sample.labels, sample.problem)
    member = sample.image
    member = member._replace(problem=sample.problem or member.problem)
    return member_entry(found, member, name, sample.labels, block)
