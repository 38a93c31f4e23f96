"""tfdist/compat/leveldb_table.py: what is written is read; TensorFlow's own are in test_checkpoint_index.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.compat import leveldb_table

KEYS = st.binary(max_size=6) | st.lists(st.sampled_from([b"a", b"b", b"\xff", b"\0", b"long" * 60])).map(b"".join)


@given(st.dictionaries(KEYS, st.sampled_from([0, 1, 2, 100_000, 300_000]).map(bytes), max_size=40))
def test_what_is_written_is_read(rows):
    """In one block and in several."""
    assert list(leveldb_table.entries(leveldb_table.table(sorted(rows.items())))) == sorted(rows.items())


@given(st.integers(0, 2**64 - 1))
def test_a_number_is_seven_bits_a_byte(value):
    digits = leveldb_table.number(value)
    assert sum((byte & 0x7F) << 7 * place for place, byte in enumerate(digits)) == value
    assert [byte >> 7 for byte in digits] == [1] * (len(digits) - 1) + [0]


def test_what_is_no_table_is_refused():
    table = leveldb_table.table([(b"a", b"b")])
    for wrong in (b"", table[:-1], table[:20] + b"\0" * 8, table[1:]):
        with pytest.raises((ValueError, IndexError)):
            list(leveldb_table.entries(wrong))
