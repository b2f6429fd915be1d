"""Servers of other projects, from pip, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Server:
    """A running server: its process, its addresses, and the file of its messages."""

    process: subprocess.Popen[bytes]
    http: str
    grpc: str
    metrics: str
    log: Path

    def is_ready(self) -> bool:
        """Whether all models are ready."""
        try:
            with urllib.request.urlopen(f"http://{self.http}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, address: str) -> str:
        """The answer at an address."""
        with urllib.request.urlopen(f"http://{address}", timeout=20) as answer:
            return str(answer.read().decode())

    def post(self, address: str) -> None:
        """Post to an address. Raises HTTPError if the server refuses."""
        with urllib.request.urlopen(f"http://{address}", data=b"", timeout=60):
            pass

    def stop(self) -> None:
        """Ask the server to end."""
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def counted(server: Server) -> dict[str, float]:
    """splitc's metrics on a server's page, by name and labels."""
    lines = [line for line in server.get(f"{server.metrics}/metrics").splitlines() if line.startswith("splitc_")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def free_ports(count: int) -> list[int]:
    """Free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def running(command: Sequence[str], env: Mapping[str, str], ports: Sequence[int], log: Path) -> Iterator[Server]:
    """Run a server, from when it is ready until the block ends."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=dict(env), stdout=file, stderr=subprocess.STDOUT)
    http, grpc, metrics = (f"127.0.0.1:{port}" for port in ports)
    server = Server(process, http, grpc, metrics, log)
    try:
        end = time.monotonic() + 90
        while not server.is_ready():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.2)
        yield server
    finally:
        server.stop()


def has_triton() -> bool:
    """Whether the server of nvidia-pytriton is installed, and a client."""
    return find_spec("pytriton") is not None and find_spec("tritonclient") is not None


@contextmanager
def triton_server(repository: Path, folder: Path) -> Iterator[Server]:
    """Run Triton with a model repository. Its backends and messages go into `folder`."""
    found = find_spec("pytriton")
    assert found is not None and found.submodule_search_locations
    pytriton = Path(found.submodule_search_locations[0])
    backends = folder / "backends"
    if not backends.exists():  # with the backend's process for this Python
        shutil.copytree(pytriton / "tritonserver" / "backends", backends)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = pytriton / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
        shutil.copy(stub, backends / "python")
    ports = free_ports(3)
    names = ("http", "grpc", "metrics")
    command = [
        str(pytriton / "tritonserver" / "bin" / "tritonserver"),
        *("--model-repository", str(repository), "--backend-directory", str(backends)),
        *(word for name, port in zip(names, ports) for word in (f"--{name}-port", str(port))),
    ]
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(pytriton.parent / "nvidia_pytriton.libs"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),  # models of the tests themselves
    }
    with running(command, env, ports, folder / "triton.log") as server:
        yield server


def has_mlserver() -> bool:
    """Whether MLServer is installed, and a client."""
    return find_spec("mlserver") is not None and find_spec("tritonclient") is not None


@contextmanager
def ml_server(models: Path, folder: Path) -> Iterator[Server]:
    """Run MLServer with a folder of models. Its messages go into `folder`."""
    ports = free_ports(3)
    names = ("MLSERVER_HTTP_PORT", "MLSERVER_GRPC_PORT", "MLSERVER_METRICS_PORT")
    env = {**os.environ, **{name: str(port) for name, port in zip(names, ports)}}
    command = [str(Path(sys.executable).with_name("mlserver")), "start", str(models)]
    with running(command, env, ports, folder / "mlserver.log") as server:
        yield server
