import io
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from tests.helpers.corpus import photos
from tests.helpers.odd_images import (
    arithmetic_jpeg,
    exif,
    four_corners,
    frame_at,
    icc_profile,
    oriented,
    patched,
    saved,
    with_segment,
)
from tests.helpers.small_dataset import encoded, picture
from vitscale.config.errors import DataError
from vitscale.config.recipe import AugmentConfig
from vitscale.data.augment import inception_box
from vitscale.data.decode import decode_rgb, jpeg_header
from vitscale.data.picture import eval_example, fast_path, train_example
from vitscale.data.resample import Box, resize

if fast_path:
    from vitscale.data import _pixels

CHECKOUT = Path(__file__).resolve().parents[2]
needs_extension = pytest.mark.skipif(not fast_path, reason="the C extension is not built here")
RATIO = (0.75, 4 / 3)
SMOOTH = AugmentConfig(antialias=True)
PHOTO = Image.fromarray(photos()[0])


def example(data, size=32, config=SMOOTH, scale="exact", seed=0, channels=3, compiled=fast_path):
    out = np.full((channels, size, size), 77, np.uint8)
    train_example(data, out, config, scale, np.random.default_rng(seed), compiled)
    return out


def evaluated(data, size=32, config=SMOOTH, channels=3, compiled=fast_path):
    out = np.full((channels, size, size), 77, np.uint8)
    eval_example(data, out, config, compiled)
    return out


def expected(data, size, config, seed):
    """The whole picture by the reference decoder, then NumPy; step by step."""
    rng = np.random.default_rng(seed)
    flip = rng.random() < config.hflip
    pixels = decode_rgb(data, 3)
    box = inception_box(*pixels.shape[:2], config.crop_scale, config.crop_ratio, rng)
    out = np.empty((3, size, size), np.uint8)
    resize(pixels, box, out, flip, config.antialias)
    return out


def jpeg(width=90, height=70, seed=0, **options):
    return saved(picture(seed, width, height), **{"quality": 90, **options})


def noise(width, height):
    return np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)


KINDS = {
    "444": jpeg(subsampling=0),
    "422": jpeg(91, 71, subsampling=1),
    "420": jpeg(97, 65, subsampling=2),
    "440": simplejpeg.encode_jpeg(noise(91, 61), 90, colorsubsampling="440"),
    "411": simplejpeg.encode_jpeg(noise(99, 61), 90, colorsubsampling="411"),
    "noise": simplejpeg.encode_jpeg(noise(77, 93), 95, colorsubsampling="420"),
    "grey": saved(picture(1, 91, 61).convert("L"), quality=90),
    "grey-progressive": saved(picture(1, 91, 61).convert("L"), progressive=True),
    "progressive": jpeg(101, 83, subsampling=2, progressive=True),
    "progressive-444": jpeg(60, 83, progressive=True),
    "restarts": jpeg(120, 90, subsampling=2, restart_marker_blocks=3),
    "restart-rows": jpeg(120, 90, subsampling=1, restart_marker_rows=1),
    "optimised": jpeg(120, 90, subsampling=2, optimize=True),
    "coarse": jpeg(120, 90, subsampling=2, quality=5),
    "rgb": jpeg(70, 50, keep_rgb=True),
    "one-pixel": jpeg(1, 1, subsampling=2),
    "strip": jpeg(300, 3, subsampling=2),
    "column": jpeg(5, 200, subsampling=2),
    "srgb-profile": jpeg(icc_profile=icc_profile(wide=False)),
    "upright": with_segment(jpeg(), 0xE1, exif(oriented(1))),
    "fill-bytes-before-the-end": jpeg()[:-2] + b"\xff\xff\xff\xd9",
}
# These go through the reference decoder, wholly.
ODD = {
    "turned": with_segment(saved(four_corners()), 0xE1, exif(oriented(6))),
    "wide-gamut": saved(four_corners(), icc_profile=icc_profile()),
    "grey-profile": saved(four_corners()[:, :, 0], icc_profile=icc_profile(b"GRAY", 1.0)),
    "cmyk": saved(picture(2).convert("CMYK")),
    "png": encoded(picture(3), "PNG"),
    "palette": encoded(picture(3).convert("P"), "PNG"),
    "webp": encoded(picture(4), "WEBP"),
    "16-bit": encoded(Image.fromarray(np.arange(2000, dtype=np.uint16).reshape(40, 50)), "PNG"),
    "arithmetic": arithmetic_jpeg(),
    "bytes-behind-the-end": jpeg() + bytes(9),
}


@needs_extension
@pytest.mark.parametrize("kind", [*KINDS, *ODD])
@pytest.mark.parametrize("channels", [1, 3])
def test_extension_and_reference_make_the_same_examples(kind, channels):
    data = {**KINDS, **ODD}[kind]
    for seed in range(25):
        config = AugmentConfig(antialias=bool(seed % 2))
        options = {"size": (7, 24, 96)[seed % 3], "config": config, "channels": channels}

        reference = example(data, seed=seed, compiled=False, **options)

        assert (example(data, seed=seed, **options) == reference).all(), seed


@needs_extension
@pytest.mark.parametrize("kind", ["444", "422", "420", "progressive", "grey", "restarts"])
@pytest.mark.parametrize("channels", [1, 3])
def test_scaled_decodes_of_extension_and_reference_are_the_same(kind, channels):
    data = {
        "444": jpeg(413, 301),
        "422": jpeg(413, 301, subsampling=1),
        "420": jpeg(413, 301, subsampling=2),
        "progressive": jpeg(413, 301, subsampling=2, progressive=True),
        "grey": saved(picture(1, 413, 301).convert("L")),
        "restarts": jpeg(413, 301, subsampling=2, restart_marker_blocks=5),
    }[kind]
    for seed in range(12):
        # Crops of all sizes, for 8, 4, 2 and 1 eighths.
        options = {"size": (9, 24, 50)[seed % 3], "scale": "fast", "channels": channels}

        reference = example(data, seed=seed, compiled=False, **options)

        assert (example(data, seed=seed, **options) == reference).all(), seed


@needs_extension
@pytest.mark.parametrize("kind", ODD)
def test_fast_scale_leaves_odd_pictures_alone(kind):
    for compiled in (False, True):
        fast = example(ODD[kind], 8, scale="fast", compiled=compiled)

        assert (fast == example(ODD[kind], 8)).all()


@needs_extension
def test_a_progressive_file_without_its_last_scans_is_smoothed_alike():
    whole = jpeg(200, 150, subsampling=2, progressive=True)
    # libjpeg guesses the fine detail that later scans would have brought.
    scans = [at for at in range(len(whole)) if whole[at : at + 2] == b"\xff\xda"]
    for last in scans[2:-1]:
        early = whole[:last] + b"\xff\xd9"
        for seed in range(6):
            reference = example(early, 60, seed=seed, compiled=False)

            assert (example(early, 60, seed=seed) == reference).all()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_extension)])
def test_the_example_is_flip_then_crop_of_the_given_stream(compiled):
    data = jpeg(200, 160)
    for seed in range(20):
        config = AugmentConfig(crop_scale=(0.2, 0.9), hflip=0.4)

        assert (
            example(data, 30, config, seed=seed, compiled=compiled)
            == expected(data, 30, config, seed)
        ).all()


def test_train_example_is_a_function_of_its_generator():
    data = jpeg()

    assert (example(data, seed=1) == example(data, seed=1)).all()
    assert (example(data, seed=1) != example(data, seed=2)).any()


def test_train_example_flips_with_the_given_probability():
    data = jpeg(20, 20)
    config = AugmentConfig(train_crop="resize", hflip=0.25)
    plain = example(data, 16, AugmentConfig(train_crop="resize", hflip=0))
    mirrored = example(data, 16, AugmentConfig(train_crop="resize", hflip=1))

    made = [example(data, 16, config, seed=seed) for seed in range(1000)]

    flips = sum((one == mirrored).all() for one in made)
    assert (mirrored == plain[:, :, ::-1]).all()
    assert flips + sum((one == plain).all() for one in made) == 1000
    assert 200 < flips < 300


def test_train_example_crop_is_part_of_the_picture():
    # Every pixel holds its place: rows in channel 0, columns in channel 1.
    rows, columns = np.meshgrid(np.arange(200), np.arange(250), indexing="ij")
    places = np.stack([rows, columns, 0 * rows], axis=2).astype(np.uint8)
    config = AugmentConfig(hflip=0.0, crop_scale=(0.2, 0.3))
    rng = np.random.default_rng(5)
    rng.random()  # the flip
    box = inception_box(200, 250, (0.2, 0.3), RATIO, rng)

    image = example(encoded(Image.fromarray(places), "PNG"), 40, config, seed=5).astype(int)

    assert abs(image[0].min() - box.top) <= 2
    assert abs(image[0].max() - (box.top + box.height - 1)) <= 2
    assert abs(image[1].min() - box.left) <= 2
    assert abs(image[1].max() - (box.left + box.width - 1)) <= 2


@pytest.mark.parametrize(("scale", "mean_level", "size"), [("exact", 0.5, 64), ("fast", 3, 64)])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_examples_are_near_pillows_antialiased_resize(scale, mean_level, size, subsampling):
    config = AugmentConfig(antialias=True, hflip=0)
    differences = []
    for seed in range(16):
        data = saved(Image.fromarray(photos()[seed % 2]), quality=90, subsampling=subsampling)
        rng = np.random.default_rng(seed)
        rng.random()
        width, height = PHOTO.size
        top, left, rows, columns = inception_box(height, width, (0.05, 1), RATIO, rng)
        box = (left, top, left + columns, top + rows)
        whole = Image.open(io.BytesIO(data))
        pillows = np.asarray(whole.resize((size, size), Image.Resampling.BILINEAR, box))

        ours = example(data, size, config, scale, seed).transpose(1, 2, 0)

        differences.append(np.abs(ours.astype(int) - pillows).mean())
    assert np.mean(differences) < mean_level
    assert scale == "exact" or np.mean(differences) > 0.1  # it did decode at a smaller scale


@needs_extension
@pytest.mark.parametrize("kind", ["420", "progressive", "restarts", "grey"])
def test_damage_anywhere_is_an_error_or_a_picture_and_never_a_crash(kind):
    data = KINDS[kind]
    rng = np.random.default_rng(0)
    refused = 0
    for trial in range(1500):
        spoilt = bytearray(data)
        for _ in range(rng.integers(1, 6)):
            spoilt[rng.integers(2, len(data) - 2)] = rng.integers(256)
        try:
            example(bytes(spoilt), 8, seed=trial)
        except DataError:
            refused += 1
    assert refused > 150


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_extension)])
@pytest.mark.parametrize("kind", ["420", "progressive"])
def test_truncation_anywhere_is_refused(kind, compiled):
    data = KINDS[kind]
    config = AugmentConfig(antialias=True, crop_scale=(0.05, 0.1))
    for length in [*range(0, len(data) - 2, 97), len(data) - 100]:
        with pytest.raises(DataError):
            example(data[:length], 8, config, compiled=compiled)


@needs_extension
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("another restart", "found marker 0xd5 instead of RST3"),
        ("ones", "bad Huffman code"),
        ("early end", "premature end of data segment"),
        ("stray bytes", "extraneous bytes before marker 0xd3"),
    ],
)
def test_damaged_codes_are_refused_with_the_decoders_words(damage, words):
    data = jpeg(200, 150, restart_marker_blocks=4)
    at = data.rfind(b"\xff\xd3")
    spoilt = {
        "another restart": patched(data, at, b"\xff\xd5"),
        "ones": patched(data, at + 2, b"\xff\x00" * 9),
        "early end": data[: at - 5] + b"\xff\xd9",
        "stray bytes": data[:at] + bytes(99) + data[at:],
    }[damage]
    whole = AugmentConfig(train_crop="resize", antialias=True)

    with pytest.raises(DataError, match=rf"cannot decode \d+ bytes: Corrupt JPEG data: .*{words}"):
        example(spoilt, 40, whole)


@needs_extension
def test_bytes_that_decoders_skip_before_the_end_are_no_damage():
    data = KINDS["progressive"]
    stray = data[:-2] + bytes(70) + data[-2:]

    with pytest.raises(ValueError, match="extraneous bytes before marker 0xd9"):
        simplejpeg.decode_jpeg(stray)
    assert (example(stray) == example(data)).all()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_extension)])
@pytest.mark.parametrize("scale", ["exact", "fast"])
def test_too_many_pixels_are_refused_before_decoding(compiled, scale):
    data = jpeg()
    height_at = frame_at(data) + 5

    with pytest.raises(DataError, match="too big"):
        example(patched(data, height_at, b"\xff\xdc\xff\xdc"), 32, SMOOTH, scale, 0, 3, compiled)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_extension)])
@pytest.mark.parametrize("data", [b"", b"<html>not found</html>", b"\xff\xd8\xff\xd9"])
def test_other_content_is_refused(data, compiled):
    with pytest.raises(DataError, match=f"cannot decode {len(data)} bytes"):
        example(data, compiled=compiled)
    with pytest.raises(DataError, match=f"cannot decode {len(data)} bytes"):
        evaluated(data, compiled=compiled)


@needs_extension
@pytest.mark.parametrize("kind", KINDS)
def test_headers_read_by_libjpeg_and_pillow_are_the_same(kind):
    *sizes, segments = _pixels.header(KINDS[kind])
    *others, all_segments = jpeg_header(KINDS[kind])

    assert sizes == others
    assert segments == [one for one in all_segments if one[0] in (0xE1, 0xE2)]


@needs_extension
def test_extension_refuses_arguments_that_make_no_sense():
    data, out = jpeg(), np.zeros((3, 8, 8), np.uint8)

    for eighths in (0, 9, -1):
        with pytest.raises(ValueError, match="eighths"):
            _pixels.example(data, eighths, 0, 0, 9, 9, out, False, True)
    for box in ((0, 0, 71, 90), (-1, 0, 9, 9), (0, 0, 0, 9), (0, float("nan"), 9, 9)):
        with pytest.raises(ValueError, match="not inside"):
            _pixels.example(data, 8, *box, out, False, True)
    with pytest.raises(ValueError, match="1 and 3 components"):
        _pixels.example(ODD["cmyk"], 8, 0, 0, 9, 9, out, False, True)
    with pytest.raises(ValueError, match="Not a JPEG file"):
        _pixels.header(b"GIF89a")


@needs_extension
def test_threads_do_not_disturb_each_other():
    files = [KINDS[kind] for kind in ("420", "progressive", "grey", "restarts")]
    alone = [example(data, 64) for data in files]
    wrong = []

    def work(number):
        for turn in range(60):
            which = (number + turn) % 4
            if not (example(files[which], 64) == alone[which]).all():
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_extension
def test_memory_stays_flat_over_pictures_and_errors():
    data = jpeg(300, 200, subsampling=2, restart_marker_blocks=4)
    broken = patched(data, data.rfind(b"\xff\xd3"), b"\x12\x34")
    whole = AugmentConfig(train_crop="resize")

    def turns(count):
        for _ in range(count):
            example(data, 64, whole)
            with pytest.raises(DataError):
                example(broken, 64, whole)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = turns(50)

    # A row of pixels is about 1 kB, so a leak of one a picture shows.
    assert turns(1000) - before < 1000


def test_without_the_extension_the_pixels_are_the_same(tmp_path):
    (tmp_path / "a.jpg").write_bytes(KINDS["420"])
    program = f"""
import sys
sys.modules["vitscale.data._pixels"] = None  # as if it had not been built
import numpy as np
from vitscale.config.recipe import AugmentConfig
from vitscale.data.picture import fast_path, train_example
out = np.empty((3, 32, 32), np.uint8)
data = open({str(tmp_path / "a.jpg")!r}, "rb").read()
train_example(data, out, AugmentConfig(antialias=True), "exact", np.random.default_rng(0))
assert not fast_path
assert "torch" not in sys.modules
sys.stdout.write(out.tobytes().hex())
"""

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )

    assert bytes.fromhex(done.stdout) == example(KINDS["420"]).tobytes()


@pytest.mark.skipif(sys.platform == "win32", reason="no such compiler settings")
def test_installing_without_a_compiler_goes_on_and_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path, "--build-temp",
         tmp_path / "temp"],
        cwd=CHECKOUT, capture_output=True, text=True, env={"CC": "false", "PATH": "/usr/bin"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "vitscale.data._pixels is not built" in done.stderr
    assert "libjpeg-turbo" in done.stderr
    assert not list(tmp_path.rglob("_pixels*.so"))


@pytest.mark.parametrize("size", [(100, 75), (75, 100), (500, 400), (10, 300), (8, 8)])
@pytest.mark.parametrize("channels", [1, 3])
def test_eval_example_centre_crop_has_the_right_shape_and_middle(size, channels):
    height, width = size
    rows, columns = np.meshgrid(
        np.linspace(0, 255, height), np.linspace(0, 255, width), indexing="ij"
    )
    pixels = np.stack([rows, columns, rows], axis=2).astype(np.uint8)

    image = evaluated(encoded(Image.fromarray(pixels), "PNG"), 56, channels=channels)

    # A crop of the middle has a symmetric gradient around the middle of the values.
    assert abs(image[0].mean() - 127.5) < 4
    assert abs(image[channels // 2].mean() - 127.5) < 4


def test_eval_example_centre_crop_follows_resize_then_crop():
    pixels = picture(3, 512, 384)

    image = evaluated(encoded(pixels, "PNG"), 224)

    small = pixels.resize((341, 256), Image.Resampling.BOX)
    assert (image.transpose(1, 2, 0) == np.asarray(small)[16:240, 58:282]).all()


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_extension)])
def test_eval_example_resize_uses_the_whole_picture(antialias, compiled):
    config = AugmentConfig(eval_crop="resize", antialias=antialias)
    whole = np.empty((3, 32, 32), np.uint8)
    resize(decode_rgb(KINDS["420"], 3), Box(0, 0, 65, 97), whole, False, antialias)

    assert (evaluated(KINDS["420"], 32, config, compiled=compiled) == whole).all()
