"""The error that says: this input cannot be packed, all others can."""


class BadInputError(Exception):
    """An input that cannot be packed.

    Args:
        reason: For the ledger, `WORD: detail`. Words: empty, not_an_image, truncated, corrupt,
            too_large, unsupported, bad_shape, unreadable, loop, missing_file, no_label, bad_label,
            duplicate, incomplete_sample.
        image_format: What it is, as far as that was seen: "jpg", "png", "gif", ...; else empty.
        width: px, as far as that was seen; else 0.
        height: px, likewise.
    """

    def __init__(
        self, reason: str, image_format: str = "", width: int = 0, height: int = 0
    ) -> None:
        super().__init__(reason)
        self.image_format, self.width, self.height = image_format, width, height
