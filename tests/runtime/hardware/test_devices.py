import math
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitc.runtime.engines.onnxruntime_cpu import check_free
from splitc.runtime.errors import EngineError, MisuseError
from splitc.runtime.hardware import devices
from splitc.runtime.hardware.control_groups import cpu_limit, memory_limit
from splitc.runtime.hardware.devices import (
    bound_cores,
    cache_bytes,
    cores,
    free_bytes,
    list_devices,
    parse_devices,
    parse_hosts,
    threads_for,
)

STATISTICS = "anon 3000\nactive_file 1000\ninactive_file 2000"


def write_groups(root: Path, groups: str, files: dict[str, str]) -> None:
    """The system's files about this process's control groups, in a folder."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{each}": files[each] for each in files}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("4:memory:/x\n3:cpuacct,cpu:/x", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ("3:cpu:/x\n0::/", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, math.inf),
        ("4:memory:/", {}, math.inf),
    ],
)
def test_limit_of_control_groups_is_read(groups: str, files: dict[str, str], limit: float, tmp_path: Path) -> None:
    write_groups(tmp_path, groups, files)
    assert cpu_limit(tmp_path) == limit


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {"memory.max": "9000", "memory.current": "5000", "memory.stat": STATISTICS}, (9000, 7000)),
        ("0::/", {"memory.max": "9000", "memory.current": "5000", "memory.stat": "cache 5"}, (9000, 9000)),
        ("0::/", {"memory.max": "9000", "memory.current": "5000", "memory.stat": f"hm\n{STATISTICS}"}, (9000, 9000)),
        ("0::/", {"memory.max": "max", "memory.current": "5000", "memory.stat": STATISTICS}, (math.inf, math.inf)),
        (
            "0::/a/b",
            {
                **{"a/memory.max": "9000", "a/memory.current": "8000", "a/memory.stat": STATISTICS},
                **{"a/b/memory.max": "8000", "a/b/memory.current": "3000", "a/b/memory.stat": STATISTICS},
            },
            (8000, 4000),
        ),
        (
            "4:memory:/x\n0::/",
            {
                "memory/memory.limit_in_bytes": "9000",
                "memory/memory.usage_in_bytes": "5000",
                "memory/memory.stat": f"active_file 7\n{STATISTICS}".replace("\n", "\ntotal_"),
            },
            (9000, 7000),
        ),
        (
            "0::/a",
            {
                **{"memory.max": "max", "memory.high": "9000", "memory.current": "8000", "memory.stat": STATISTICS},
                **{"a/memory.max": "9500", "a/memory.high": "max", "a/memory.current": "4000"},
                "a/memory.stat": STATISTICS,
            },
            (9000, 4000),
        ),
        (
            "4:memory:/",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "5000",
                "memory/memory.stat": "total_active_file 0\ntotal_inactive_file 0",
            },
            (math.inf, math.inf),
        ),
        ("0::/", {}, (math.inf, math.inf)),
    ],
)
def test_memory_of_control_groups_is_read(
    groups: str, files: dict[str, str], limit: tuple[float, float], tmp_path: Path
) -> None:
    """The page cache counts as free: weights are mapped."""
    write_groups(tmp_path, groups, files)
    assert memory_limit(tmp_path) == limit


def test_no_more_memory_is_planned_with_than_control_groups_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.hardware.devices.memory_limit", lambda: (4 << 20, 3 << 20))
    (cpu, *_) = list_devices()
    assert (cpu.total_bytes, cpu.free_bytes) == (4 << 20, 3 << 20)
    assert free_bytes(parse_devices(["3xcpu"])) == [1 << 20] * 3
    with pytest.raises(EngineError, match=r"need 64\.0 MiB, and 3\.00 MiB is free"):
        check_free(64 << 20)


def test_cores_are_those_that_the_process_is_bound_to() -> None:
    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):
        pytest.skip("processes can't be bound to cores")
    assert bound_cores() == sorted(process.cpu_affinity())


def test_no_more_cores_are_used_than_control_groups_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, count in ((0.5, 1), (1.5, 1), (math.inf, len(bound_cores()))):
        monkeypatch.setattr("splitc.runtime.hardware.devices.cpu_limit", lambda limit=limit: limit)
        assert cores() == count


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["cpu0", "cpu1"], ["cpu0", "cpu1"]),
        (["cpu0&cpu1"], ["cpu0", "cpu1"]),
        (["cpu:0", "CPU1"], ["cpu0", "cpu1"]),
        (["3xcpu"], ["cpu0", "cpu1", "cpu2"]),
        (["cpu4", "cpu4"], ["cpu4", "cpu4"]),
        (["CUDA0&cuda:1", "2xcpu"], ["cuda0", "cuda1", "cpu0", "cpu1"]),
        (["host0/cuda:1&HOST1/2xcuda"], ["host0/cuda1", "host1/cuda0", "host1/cuda1"]),
    ],
)
def test_names_are_read_as_users_write_them(texts: list[str], names: list[str]) -> None:
    assert [str(device) for device in parse_devices(texts)] == names


@pytest.mark.parametrize(
    "text", ["cup0", "cpu", "0xcpu", "xcpu", "cpu-1", "", "host/cpu0", "host0", "host0/host1/cpu0"]
)
def test_unknown_name_says_which_exist(text: str) -> None:
    with pytest.raises(MisuseError, match="there are cpu0, cpu1"):
        parse_devices([text])


def test_no_device_says_how_to_name_one() -> None:
    with pytest.raises(MisuseError, match="no GPU is seen here: name some"):
        parse_devices([])


def test_without_devices_all_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 3)
    assert [str(device) for device in parse_devices([])] == ["cuda0", "cuda1", "cuda2"]


def test_hosts_are_named_for_all_devices_or_none() -> None:
    with pytest.raises(MisuseError, match="host1/cpu0 names its host and cuda2 does not"):
        parse_devices(["cuda2", "host1/cpu0"])


def test_hosts_that_are_alike_are_written_in_short() -> None:
    assert parse_hosts("2x2xCUDA") == parse_devices(["host0/2xcuda", "host1/2xcuda"])
    assert parse_hosts("1x1xcpu") == parse_devices(["host0/cpu0"])


@pytest.mark.parametrize("text", ["", "2xcuda", "0x4xcuda", "2x0xcuda", "2x4xgpu", "33x32xcuda"])
def test_other_hosts_are_refused(text: str) -> None:
    with pytest.raises(MisuseError):
        parse_hosts(text)


def test_devices_of_a_host_share_its_memory_and_cores_and_those_of_another_do_not() -> None:
    placed = parse_devices(["host0/2xcpu", "host1/cpu0", "host1/cuda999"])
    shared, _, alone, absent = free_bytes(placed)
    assert shared is not None and alone is not None and absent is None
    assert alone > 1.5 * shared
    assert threads_for(placed, None) == threads_for(parse_devices(["2xcpu"]), None)


def test_threads_are_divided_unless_given() -> None:
    devices = parse_devices(["1000xcpu"])
    assert threads_for(devices, None) == 1
    assert threads_for(devices, 3) == 3


@pytest.mark.parametrize("threads", [0, -1, 10**6, 10**20, "2", 1.5, True])
def test_threads_that_no_system_starts(threads: Any) -> None:
    with pytest.raises(MisuseError, match="it is a number for each CPU device from 1 to 1,024"):
        threads_for(parse_devices(["2xcpu"]), threads)


def test_cache_of_unknown_size(tmp_path: Path) -> None:
    for number, text in enumerate(("32K\n", "32768K\n", "\n")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{number}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(text)
    assert cache_bytes(tmp_path) == 32 << 20


def test_machine_has_memory() -> None:
    cpu = list_devices()[0]
    assert 0 < cpu.free_bytes <= cpu.total_bytes


def test_ranks_on_one_memory_share_it_and_an_absent_gpu_is_not_guessed_at() -> None:
    cpu0, absent, cpu1 = free_bytes(parse_devices(["cpu0", "cuda999", "cpu1"]))
    assert absent is None
    assert cpu0 == cpu1
    assert cpu0 is not None and 0 < 2 * cpu0 <= list_devices()[0].total_bytes
