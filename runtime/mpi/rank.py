"""One rank of a session whose ranks are processes that MPI has started."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from splitc.runtime.collectives.collectives import Collectives
from splitc.runtime.collectives.mail import Mail, all_gather, tell_all
from splitc.runtime.engines import Backend
from splitc.runtime.engines.built_here import check_built_here
from splitc.runtime.engines.kinds import find_kind
from splitc.runtime.engines.operator_library import load_library
from splitc.runtime.errors import PackageError, SplitcError
from splitc.runtime.hardware.gpus import identify_gpu
from splitc.runtime.ipc.channel import portable
from splitc.runtime.mpi.hosts import Finding, find_contradiction, own_device, own_threads, why_lacking
from splitc.runtime.mpi.life import abort_all
from splitc.runtime.mpi.meetings import Meetings
from splitc.runtime.mpi.messages import Call, Join, Leave, Left
from splitc.runtime.mpi.wire import MpiControl, MpiMail
from splitc.runtime.mpi.world import World
from splitc.runtime.package.files import files_of
from splitc.runtime.package.manifest import Manifest
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.verification import verify_files
from splitc.runtime.processes.begin import print_to_stderr
from splitc.runtime.processes.launch import find_groups
from splitc.runtime.processes.messages import Loaded
from splitc.runtime.processes.rank import RankProcess
from splitc.runtime.ranks.deployment import divide_container
from splitc.runtime.ranks.loaded import Setup, make_backend_of
from splitc.runtime.threads.failures import Failure, attempt


def serve(world: World) -> NoReturn:
    """Be a rank of all sessions that process 0 opens, until its program ends. Then this one ends too."""
    control = MpiControl(world.control)
    sys.stdout.flush()
    print_to_stderr()
    try:
        while not isinstance(message := control.receive(spins=False), Leave):
            if isinstance(message, Call):
                message.function(world)
            elif isinstance(message, Join):  # others are of a session that this rank has left
                own = MpiControl(world.control.in_lane(message.lane), message.spin)
                run_rank(world, message, own)
                own.send(Left())
        control.send(Left())
        world.end()
    except BaseException:  # the others would wait for this rank for ever
        print(f"rank {world.rank} on {world.hosts[world.rank]} failed:", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        abort_all()
    sys.exit(0)


def run_rank(everyone: World, join: Join, control: MpiControl) -> None:
    """Load this process's rank, and run it until the session is closed, or can't be opened."""
    prepared = attempt(lambda: _prepare(everyone, join))
    world = everyone.part(join.first, join.size)
    mail = MpiMail(world.mail, join.number, range(join.first, join.first + join.size))
    # No rank may block in MPI or NCCL before all know that all can go on.
    failure = _agree(mail, world, prepared)
    if isinstance(prepared, Failure) or failure is not None:
        control.send(Loaded(portable((failure or prepared).error)))
        return
    meetings = Meetings(world, find_groups(prepared.manifest))
    by_nccl = all(device.kind == "cuda" for device in join.devices)  # each process has one of its own
    collectives = Collectives(world.rank, world.size, mail, meetings.ends, prepared.backend, by_nccl)
    setup = Setup(world.rank, join.package, prepared.manifest, share=prepared.share)
    worker = RankProcess(setup, prepared.backend, control, collectives, join.cuda_graphs).worker
    worker.run()
    if control.closed:
        collectives.release()
    elif (error := worker.ready.exception()) is not None:
        tell_all(mail, world.rank, range(world.size), Failure(error))  # who wait for this rank, to connect
    meetings.close()


@dataclass(frozen=True)
class _Prepared:
    """The parts of a rank, its share of its container's memory, and its host."""

    manifest: Manifest
    share: int | None
    backend: Backend
    finding: Finding


def _prepare(world: World, join: Join) -> _Prepared:
    """Check that this host has what the rank needs. Raises PackageError, which names the host, if not."""
    rank, host, package = world.rank, world.hosts[world.rank], join.package
    own = rank - join.first  # in its replica, whose files are all replicas'
    try:
        _check_files(package, None, own)
        manifest = read_manifest(package)
        if manifest.sha256 != join.seal:
            raise PackageError(f"{package} is another package than process 0 has opened: copy that one here")
        _check_files(package, manifest, own)
        verify_files(package, files_of(manifest, own), join.verify)
        device = own_device(world, join.devices)
        seen = device if device.ordinal is None else replace(device, index=device.ordinal)
        check_built_here(package, manifest, [seen])
        threads = join.threads or manifest.threads or own_threads(world, join.devices)
        backend = make_backend_of(manifest, own, device, threads, join.cuda_graphs)
        share = divide_container(manifest, join.devices, world.here)[rank]  # before any rank is loaded
        if find_groups(manifest):
            load_library()
        gpu = None if device.kind == "cpu" else identify_gpu(seen.index)
    except SplitcError as error:
        raise PackageError(f"rank {rank} on {host}: {error}") from error
    library = f"{manifest.engine} {find_kind(manifest.engine).version}"
    needed = manifest.ranks[own].total_bytes
    return _Prepared(manifest, share, backend, Finding(host, world.machines[rank], library, gpu, needed))


def _check_files(package: Path, manifest: Manifest | None, rank: int) -> None:
    if (why := why_lacking(package, manifest, rank)) is not None:
        raise PackageError(why)


def _agree(mail: Mail, world: World, prepared: _Prepared | Failure) -> Failure | None:
    """The reason why a rank, or all together, can't go on; None if they can. All must call this."""
    told = prepared if isinstance(prepared, Failure) else prepared.finding
    agreed = all_gather(mail, world.rank, range(world.size), told)
    if isinstance(agreed, Failure):
        return agreed
    why = find_contradiction(agreed)
    return None if why is None else Failure(PackageError(why))
