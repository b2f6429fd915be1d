import pytest

from splitc.runtime.errors import MisuseError
from splitc.runtime.units import format_bytes, format_seconds, parse_bandwidth, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("20GiB", 20 << 30), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), ("4096", 4096), ("2 KiB", 2048)],
)
def test_bytes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_a_number_that_lacks_its_unit_is_asked_about() -> None:
    assert [parse_bytes(text) for text in ("0", "4B", "1024")] == [0, 4, 1024]
    with pytest.raises(MisuseError, match="is 80GiB meant"):
        parse_bytes("80")


def test_bandwidths_and_times_are_read() -> None:
    assert parse_bandwidth("25GB/s") == parse_bandwidth("200 Gbit/s") == 25e9
    assert parse_bandwidth("1GiB/s") == 1 << 30
    assert [parse_seconds(text) for text in ("5us", "5 µs", "0.5ms", "2s")] == pytest.approx([5e-6, 5e-6, 5e-4, 2.0])


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1XB", "1i"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(MisuseError, match="amount of memory"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1023, "1.00 KiB"), (1536, "1.50 KiB"), (167 << 20, "167 MiB"), (5 << 40, "5.00 TiB")],
)
def test_bytes_are_written_in_three_digits(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_no_limit_is_said() -> None:
    assert format_bytes(None) == "no limit"


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 µs"), (0, "0 ns")])
def test_seconds_are_formatted(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
