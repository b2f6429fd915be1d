"""Budgets of devices: from --memory, or from free memory."""

from __future__ import annotations

import pytest

from splitc.compiler.planning import resources
from splitc.compiler.planning.resources import check_shares, find_budgets
from splitc.compiler.request.request import Request
from splitc.runtime.errors import MisuseError
from splitc.runtime.hardware.devices import parse_devices

GIB = 1 << 30


@pytest.mark.parametrize("memory", [["2GiB", "cpu1=3GiB"], ["cpu1=3GiB", "2GiB"]])
def test_budget_of_a_device_overrides_that_of_all(memory: list[str]) -> None:
    assert find_budgets(parse_devices(["3xcpu"]), memory, GIB) == [2 * GIB, 3 * GIB, 2 * GIB]


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (["4GiB", "2GiB"], "--memory gives two budgets of all devices: name a device, as in --memory cpu1=2GiB"),
        (["cpu1=4GiB", "1GiB", "cpu1=2GiB"], "--memory gives two budgets of cpu1$"),
    ],
)
def test_second_budget_is_refused(memory: list[str], message: str) -> None:
    """They may be meant for one device after the other: the last one counted for all."""
    with pytest.raises(MisuseError, match=message):
        find_budgets(parse_devices(["2xcpu"]), memory, GIB)


def test_budget_in_python_may_be_one_text() -> None:
    assert Request(memory="2GiB").memory == ["2GiB"]
    assert Request(memory=4).memory == Request(memory=[4]).memory == ["4"]  # type: ignore[arg-type, list-item]


def test_devices_without_a_budget_get_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "free_bytes", lambda devices: [4 * GIB, 4 * GIB, None])
    devices = parse_devices(["cpu0", "cpu1", "cuda0"])
    assert find_budgets(devices, ["cpu1=3GiB"], GIB) == [4 * GIB - GIB // 2, 3 * GIB, None]


def test_memory_is_not_looked_at_if_all_budgets_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Querying GPUs takes a second, and memory on each."""
    monkeypatch.setattr(resources, "free_bytes", None)
    assert find_budgets(parse_devices(["2xcuda"]), ["cuda0=1GiB", "cuda1=2GiB"], GIB) == [GIB, 2 * GIB]


def test_device_that_comes_twice_has_one_budget() -> None:
    with pytest.raises(MisuseError, match="cpu0 is named 2 times, and each rank would be given its whole memory"):
        find_budgets(parse_devices(["cpu0", "cpu1", "cpu0"]), [], 0)


def test_share_of_next_to_nothing_is_refused() -> None:
    check_shares([1000.0, 1.0], 2)
    with pytest.raises(MisuseError, match="has the shares 1e-300 and 1: the least is a millionth of the largest"):
        check_shares([1.0, 1e-300], 2)
