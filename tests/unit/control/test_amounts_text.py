"""Amounts as readers see them; the texts are those of before they stood in one module."""

import pytest

from tfdist.control import amounts_text


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        (
            amounts_text.long_time,
            {
                0: "0.0 s",
                0.04: "0.0 s",
                37.24: "37.2 s",
                99.94: "99.9 s",
                99.99: "100.0 s",
                100: "1:40 min",
                307.4: "5:07 min",
                3599.4: "59:59 min",
                3599.6: "1:00:00 h",
                11107: "3:05:07 h",
                360000.0: "100:00:00 h",
            },
        ),
        (
            amounts_text.short_time,
            {
                0: "0 ms",
                0.0034: "3.4 ms",
                0.0123456: "12.3 ms",
                0.9996: "1e+03 ms",
                1: "1 s",
                1.25: "1.25 s",
                75.04: "75 s",
                1234.5: "1.23e+03 s",
            },
        ),
        (
            amounts_text.clock_time,
            {
                0: "0:00:00",
                59.9: "0:00:59",
                60: "0:01:00",
                200.0: "0:03:20",
                3599.99: "0:59:59",
                3600: "1:00:00",
                90061.5: "25:01:01",
            },
        ),
        (
            amounts_text.with_prefix,
            {0: "", 7: "7", 999: "999", 999.6: "1 k", 207.6e6: "208 M", 4.2e15: "4.2 P", -1500.0: "-1.5 k", 0.5: "0.5"},
        ),
        (
            amounts_text.bytes_with_unit,
            {
                0: "0 B",
                7: "7 B",
                999: "999 B",
                999.9: "1e+03 B",
                1000: "1 kB",
                1536: "1.54 kB",
                207.6e6: "208 MB",
                1.25e9: "1.25 GB",
                999.9e9: "1e+03 GB",
                4.2e12: "4.2 TB",
                5e15: "5e+03 TB",
            },
        ),
    ],
)
def test_amounts(function, texts):
    assert {value: function(value) for value in texts} == texts


def test_numbers_with_their_word():
    assert [amounts_text.counted(number, "restart") for number in (0, 1, 2, 1234)] == [
        "0 restarts",
        "1 restart",
        "2 restarts",
        "1,234 restarts",
    ]
