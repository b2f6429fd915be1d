"""As in a container: PID 1, a read-only home and package, no /dev/shm, few descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.mpi import ROOT
from tests.helpers.packages import compile_mode

# A process in namespaces of its own, with the rights that it needs in them.
UNSHARED = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc")
# The home is $1 and the package $2.
READ_ONLY = """
set -e
mount -t tmpfs -o ro none "$1"
mount -t tmpfs -o ro none /dev/shm
mount --bind "$2" "$2"
mount -o remount,ro,bind "$2"
ulimit -n 256
exec "${@:3}"
"""
PROGRAM = """
import os, signal, sys
from pathlib import Path
import psutil
from splitc.runtime import Session
from splitc.runtime.errors import SplitcError
from tests.helpers.feeds import decoder_feeds
assert os.getpid() == 1
for place in (Path.home(), Path("/dev/shm"), Path(sys.argv[1])):
    try:
        (place / "file").touch()
    except OSError:
        continue
    raise AssertionError(place)
for ranks in ("threads", "processes"):
    with Session(sys.argv[1], ranks=ranks, threads=1) as session:
        session.run(decoder_feeds())
        if ranks == "processes":
            psutil.Process().children()[0].kill()
            try:
                while True:
                    session.run(decoder_feeds())
            except SplitcError as error:
                assert "was ended by SIGKILL" in str(error), error
print(psutil.Process().children(recursive=True))
"""


@cache
def may_unshare() -> bool:
    return subprocess.run([*UNSHARED, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has namespaces")
def test_first_process_of_a_container(decoder: Path, tmp_path: Path) -> None:
    """No ended process is left as a zombie: PID 1 has to wait for all."""
    if not may_unshare():
        pytest.skip("this user may not make namespaces")
    package, home = compile_mode(decoder, "tensor"), tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG")}
    command = ["bash", "-c", READ_ONLY, "bash", str(home), str(package), sys.executable, "-c", PROGRAM, str(package)]
    done = subprocess.run(
        [*UNSHARED, *command], env={**environment, "HOME": str(home)}, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)
