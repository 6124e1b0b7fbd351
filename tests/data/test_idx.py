"""Files in the format of MNIST."""

import gzip
import struct
import tracemalloc

import numpy as np
import pytest

from bflcore import DataError
from bflcore.data.idx import read_idx


def idx(array, magic=b"\0\0\x08"):
    header = magic + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


IMAGES = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_are_read_plain_and_gzipped(tmp_path, packed):
    path = tmp_path / ("images.gz" if packed else "images")
    path.write_bytes(gzip.compress(idx(IMAGES)) if packed else idx(IMAGES))
    assert np.array_equal(read_idx(path), IMAGES)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (idx(IMAGES)[:-1], "truncated"),
        (idx(IMAGES)[:9], "truncated"),
        (idx(IMAGES) + b"x", "truncated or padded"),
        (idx(IMAGES, b"\0\0\x0d"), "not an idx file"),
        (b"", "not an idx file"),
        (b"\0\0\x08\xff" + b"\0\0\0\x02" * 255, "255 axes; allowed: 1 to 8"),
        (b"\0\0\x08\0", "0 axes"),
        (b"\0\0\x08\3" + b"\0\0\0\0" + b"\xff" * 8, "would need"),
        (b"\0\0\x08\3" + b"\xff" * 12, "would need .* GiB of memory; allowed"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, raw, reason):
    path = tmp_path / "images"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=f"images.*{reason}"):
        read_idx(path)


def test_a_damaged_gzip_is_named(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(IMAGES))[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path / "a.gz")


def test_no_more_is_unpacked_than_the_header_says(tmp_path):
    bomb = gzip.compress(idx(IMAGES) + bytes(200_000_000))
    assert len(bomb) < 300_000
    (tmp_path / "bomb.gz").write_bytes(bomb)
    tracemalloc.start()
    with pytest.raises(DataError, match="truncated or padded"):
        read_idx(tmp_path / "bomb.gz")
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
