"""One rank of a session whose ranks are processes that MPI has started."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from typing import NoReturn

from splitc.runtime.channel import portable
from splitc.runtime.collectives.channel_mail import all_gather, tell_all
from splitc.runtime.collectives.process_collectives import ProcessCollectives
from splitc.runtime.engines import Backend
from splitc.runtime.engines.backends import make_backend
from splitc.runtime.engines.built_here import check_built_here
from splitc.runtime.errors import PackageError, SplitcError
from splitc.runtime.failures import Failure, attempt
from splitc.runtime.manifest import Manifest
from splitc.runtime.manifest_file import FILE_NAME, read_manifest
from splitc.runtime.mpi.joining import Join, Leave, Left
from splitc.runtime.mpi.meetings import Meetings
from splitc.runtime.mpi.mpi_wire import MpiControl, MpiMail
from splitc.runtime.mpi.own_device import own_device, own_threads
from splitc.runtime.mpi.world import World
from splitc.runtime.package_files import files_of, hash_file
from splitc.runtime.processes.launch import find_groups
from splitc.runtime.processes.messages import Loaded
from splitc.runtime.processes.rank import RankProcess
from splitc.runtime.verification import verify_files
from splitc.runtime.version import VERSION


def serve(world: World) -> NoReturn:
    """Be a rank of all sessions that process 0 opens, until its program ends. Then this one ends too."""
    control = MpiControl(world.control)
    try:
        while not isinstance(message := control.receive(spins=False), Leave):
            if isinstance(message, Join):  # others are of a session that this rank has left
                run_rank(world, message, MpiControl(world.control, message.spin))
                control.send(Left())
        control.send(Left())
        world.end()
    except BaseException:  # the others would wait for this rank for ever
        print(f"rank {world.rank} on {world.hosts[world.rank]} failed:", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        world.abort()
    sys.exit(0)


def run_rank(world: World, join: Join, control: MpiControl) -> None:
    """Load this process's rank, and run it until the session is closed, or can't be opened."""
    mail, everyone = MpiMail(world.mail, join.number), range(world.size)
    prepared = attempt(lambda: _prepare(world, join))
    # Before all ranks know that all of them can go on, none waits for the others in MPI or NCCL.
    agreed = all_gather(mail, world.rank, everyone, prepared if isinstance(prepared, Failure) else None)
    if isinstance(agreed, Failure):
        control.send(Loaded(portable(agreed.error)))
        return
    meetings = Meetings(world, find_groups(prepared.manifest))
    collectives = ProcessCollectives(world.rank, world.size, mail, meetings.ends, prepared.backend)
    worker = RankProcess(
        world.rank,
        join.package,
        prepared.manifest,
        join.states,
        prepared.backend,
        control,
        collectives,
        join.cuda_graphs,
    ).worker
    worker.run()
    if (error := worker.ready.exception()) is not None:
        tell_all(mail, world.rank, everyone, Failure(error))  # who wait for this rank, to connect
    meetings.close()


@dataclass(frozen=True)
class _Prepared:
    """What a rank has found on its machine."""

    manifest: Manifest
    backend: Backend


def _prepare(world: World, join: Join) -> _Prepared:
    """See whether this machine has what the rank needs. Raises PackageError, which names the machine, if not."""
    host = world.hosts[world.rank]
    if join.version != VERSION:
        raise PackageError(f"rank {world.rank} on {host} has splitc {VERSION}, and the session {join.version}")
    try:
        manifest = read_manifest(join.package)
        if hash_file(join.package / FILE_NAME) != join.seal:
            raise PackageError(f"{join.package} is another package than that of the session")
        verify_files(join.package, files_of(manifest, world.rank), join.verify)
        device = own_device(world, join.devices)
        check_built_here(join.package, manifest, [device])
        threads = join.threads or manifest.threads or own_threads(world, join.devices)
        backend = make_backend(manifest.engine, device, threads, manifest.build, join.cuda_graphs)
    except SplitcError as error:
        raise PackageError(f"rank {world.rank} on {host}: {error}") from error
    return _Prepared(manifest, backend)
