"""Pictures of matched pairs, to judge by eye whether they are copies."""

import io
from collections.abc import Sequence

from PIL import Image, ImageDraw

from data_prep.copies import Copies, Copy
from vitscale.data.decode import decode_rgb
from vitscale.data.exclusion import split_place

TILE, GAP, TEXT = 160, 8, 40
PAIRS_ACROSS, PAIRS_DOWN = 3, 6
MAX_PAGES = 10
_SHOWN_CHARS = 26


def write_sheets(place: str, copies: Copies) -> list[str]:
    """Write pages of pairs, left the sample of the training set, the most distant pairs first.

    Args:
        place: A folder for pages pair-00.png and so on; or NAME.png for NAME.png, NAME-01.png and
            so on; a path or s3://bucket/prefix.
        copies: What was found.

    Returns:
        What was written.
    """
    ordered = sorted(copies.all(), key=lambda copy: (-copy.distance, copy.sample))
    per_page = PAIRS_ACROSS * PAIRS_DOWN
    written = []
    for page in range(min(MAX_PAGES, -(-len(ordered) // per_page))):
        data = io.BytesIO()
        _page(copies, ordered[page * per_page : (page + 1) * per_page]).save(data, "PNG")
        written.append(_page_name(place, page))
        storage, name = split_place(written[-1])
        storage.put(name, data.getvalue())
    return written


def _page_name(place: str, page: int) -> str:
    stem = place.removesuffix(".png")
    if stem == place:
        return f"{place.rstrip('/')}/pairs-{page:02d}.png"
    return place if page == 0 else f"{stem}-{page:02d}.png"


def _page(copies: Copies, shown: Sequence[Copy]) -> Image.Image:
    width, height = 2 * TILE + 3 * GAP, TILE + TEXT
    rows = -(-len(shown) // PAIRS_ACROSS)
    sheet = Image.new("RGB", (PAIRS_ACROSS * width, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for number, copy in enumerate(shown):
        left, top = number % PAIRS_ACROSS * width, number // PAIRS_ACROSS * height
        sides = ((0, copy.sample), (copy.dataset, copy.other))
        for side, (dataset, sample) in enumerate(sides):
            stored = copies.datasets[dataset][sample]
            picture = Image.fromarray(decode_rgb(stored.image, 3))
            picture.thumbnail((TILE, TILE))
            sheet.paste(picture, (left + side * (TILE + GAP), top))
            key = stored.key[-_SHOWN_CHARS:]
            draw.text((left + side * (TILE + GAP) + 2, top + TILE), key, "black")
        text = f"{copy.reason} {copy.distance:.3g}  {copies.uris[copy.dataset][-_SHOWN_CHARS:]}"
        draw.text((left + 2, top + TILE + TEXT // 2 - 4), text, "black")
    return sheet
