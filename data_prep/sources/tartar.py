"""One tar for each class, the layout in which ImageNet-1k and -21k are handed out.

Either all of them lie in one tar (ILSVRC2012_img_train.tar holds n01440764.tar and 999 more), or
in a folder. The name of its tar is the class of an image. Nothing is unpacked: the images are read
from where they lie in the outer tar.
"""

import functools
import os
from collections.abc import Iterator

from data_prep.sources.build import Column, Entry, SourceOptions, printable
from data_prep.sources.files import FoundFile, RandomFile, find_files
from data_prep.sources.tar_files import TarFiles, UniqueNames, block_of, member_entry, with_links
from data_prep.sources.tar_scan import TAR_ENDINGS, TarMember, Window, scan_file, scan_tar
from vitscale.config.errors import UserError


class ClassTars:
    """Images in tars of classes.

    Args:
        uri: A tar of tars; or the tars of the classes, as `find_files` takes them.
        options: None matters here.
    """

    kind = "tartar"

    def __init__(self, uri: str, options: SourceOptions) -> None:
        self._uri = uri
        self._tars = TarFiles()
        self._classes: set[str] = set()
        # what names begin with: the class, and a number where it has several tars
        self._folders = UniqueNames()

    def entries(self) -> Iterator[Entry]:
        """List all images.

        Raises:
            UserError: There is no such file, or a tar of tars is compressed.
            DataError: A tar is damaged.
        """
        self._classes, self._folders = set(), UniqueNames()
        files = find_files(self._uri, TAR_ENDINGS)
        for found in files:
            yield from self._of_file(found, class_of(found.uri) if len(files) > 1 else "")

    def columns(self) -> list[Column]:
        """Give the one label column; a class tar without images counts too."""
        return [Column("label", names=tuple(sorted(self._classes, key=os.fsencode)))]

    def read(self, entry: Entry) -> bytes:
        """Read one image."""
        return self._tars.read(entry)

    def _of_file(self, found: FoundFile, label: str) -> Iterator[Entry]:
        """List a file: the tar of a class, if there is a label, or one that holds such tars."""
        file = RandomFile(found.uri)
        block = block_of(file)
        images: _ClassEntries | None = None
        num_tars = 0
        for member in with_links(functools.partial(scan_file, file)):
            if member.name.lower().endswith(".tar") and not member.problem:
                if block:
                    raise UserError(
                        f"{printable(found.uri)!r} is compressed and holds tars; unpack it first, "
                        "the tars in it may stay as they are"
                    )
                num_tars += 1
                yield from self._of_member(found, file, member)
            elif label:
                images = images or self._begin(found, label, block)
                yield images.entry(member)
            else:
                problem = member.problem or "no_label: not in the tar of a class"
                member = member._replace(problem=problem)
                yield member_entry(found, member, member.name, ((),), block)
        if label and not num_tars:
            self._classes.add(label)

    def _of_member(self, found: FoundFile, file: RandomFile, tar: TarMember) -> Iterator[Entry]:
        """List the tar of a class inside another one."""

        def scan() -> Iterator[TarMember]:
            return scan_tar(Window(file, tar.offset, tar.offset + tar.num_bytes), tar.offset)

        images = self._begin(found, class_of(tar.name), "")
        yield from map(images.entry, with_links(scan))

    def _begin(self, found: FoundFile, label: str, block: str) -> "_ClassEntries":
        self._classes.add(label)
        return _ClassEntries(found, label, self._folders.name(label), block)


class _ClassEntries:
    """Makes the entries of one tar of a class."""

    def __init__(self, found: FoundFile, label: str, folder: str, block: str) -> None:
        self._found, self._label, self._folder, self._block = found, label, folder, block
        self._names = UniqueNames()

    def entry(self, member: TarMember) -> Entry:
        name = f"{self._folder}/{self._names.name(member.name)}"
        return member_entry(self._found, member, name, (self._label,), self._block)


def class_of(name: str) -> str:
    """Give the class that the name of a tar stands for: n01440764.tar -> n01440764."""
    base = name.rpartition("/")[2]
    ending = next((own for own in TAR_ENDINGS if base.lower().endswith(own)), "")
    return base[: len(base) - len(ending)]
