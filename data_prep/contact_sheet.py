"""Pictures of matched pairs, to judge by eye whether they are copies."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from vitscale.data.dataset import Dataset, open_dataset
from vitscale.data.decode import decode_rgb
from vitscale.data.manifest import load_index

TILE = 160
TEXT = 26
PAIRS_ACROSS = 3
PAIRS_DOWN = 6
MAX_PAGES = 10


def write_sheets(folder: Path, train: str, rows: Sequence[dict[str, Any]]) -> list[Path]:
    """Write pages of pairs as PNG, the most distant pairs first.

    Args:
        folder: Where to; made.
        train: The dataset that the rows are of.
        rows: Rows of a list of exclusions.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(rows, key=lambda row: (-row["distance"], row["key"]))
    a_page = PAIRS_ACROSS * PAIRS_DOWN
    lookup = _Lookup()
    written = []
    for page in range(min(MAX_PAGES, -(-len(ordered) // a_page))):
        path = folder / f"pairs-{page:02d}.png"
        data = io.BytesIO()
        _page(train, ordered[page * a_page : (page + 1) * a_page], lookup).save(data, "PNG")
        path.write_bytes(data.getvalue())
        written.append(path)
    return written


def _page(train: str, rows: Sequence[dict[str, Any]], lookup: "_Lookup") -> Image.Image:
    sheet = Image.new("RGB", (PAIRS_ACROSS * (2 * TILE + 12), PAIRS_DOWN * (TILE + TEXT)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        left = number % PAIRS_ACROSS * (2 * TILE + 12)
        top = number // PAIRS_ACROSS * (TILE + TEXT)
        pair = ((train, row["key"]), (row["against"], row["against_key"]))
        for side, (uri, key) in enumerate(pair):
            picture = lookup.picture(uri, key)
            picture.thumbnail((TILE, TILE))
            sheet.paste(picture, (left + side * TILE, top))
        text = f"{row['key']} | {row['against_key']}\n{row['reason']} {row['distance']:.3g}"
        draw.text((left + 2, top + TILE), text, "black")
    return sheet


class _Lookup:
    """Finds samples by key, in datasets that are opened once."""

    def __init__(self) -> None:
        self._datasets: dict[str, tuple[Dataset, dict[str, int]]] = {}

    def picture(self, uri: str, key: str) -> Image.Image:
        if uri not in self._datasets:
            dataset = open_dataset(uri)
            shards = range(dataset.manifest.num_shards)
            keys = (
                key
                for shard_id in shards
                for key in load_index(dataset.storage, dataset.manifest, shard_id).keys
            )
            self._datasets[uri] = dataset, {key: number for number, key in enumerate(keys)}
        dataset, numbers = self._datasets[uri]
        return Image.fromarray(decode_rgb(dataset[numbers[key]].image, 3))
