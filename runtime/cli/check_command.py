"""The command check."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer
from rich.text import Text

from splitc.runtime.arrays.settings import parse_settings
from splitc.runtime.cli import completion
from splitc.runtime.cli.bars import shown_bars
from splitc.runtime.cli.options import with_options
from splitc.runtime.cli.run_options import Load, as_run, loading, measure_ranks, open_feeds
from splitc.runtime.cli.run_tables import print_differences, print_memory, print_memory_terms, print_module_differences
from splitc.runtime.cli.shared_options import (
    FILL,
    INPUTS,
    JSON,
    MEASURE,
    PACKAGE,
    REPORT,
    SEED,
    SHAPES,
    TRUST_DATA,
    check_outputs,
    model_there,
)
from splitc.runtime.cli.terminal import out, print_json
from splitc.runtime.errors import MisuseError, OutputsDifferError, SplitcError, collected, named, raise_all
from splitc.runtime.hardware.memory_use import RankMemory
from splitc.runtime.package.manifest_file import read_manifest
from splitc.runtime.package.pipeline_file import PipelineFile, find_module, read_pipeline
from splitc.runtime.reports.page_writer import check_report, write_page
from splitc.runtime.session.session import choose_devices
from splitc.runtime.tools.compare import Difference, compare
from splitc.runtime.tools.judge import judge
from splitc.runtime.tools.unsplit import bound_inputs, describe_reference, open_reference
from splitc.runtime.units import first_few, plural


@dataclass(frozen=True)
class Checked:
    """The differences from the unsplit model's outputs, where it ran, and the ranks' memory.

    `why` says why the unsplit model ran on another kind of device. `notes` describe differences that the unsplit model
    causes itself.
    """

    outputs: list[Difference]
    reference: str
    why: str
    memory: list[RankMemory]
    notes: list[str]

    def __str__(self) -> str:
        return describe_reference(self.reference, self.why)

    @property
    def failed(self) -> list[str]:
        """The outputs that differ."""
        return [difference.name for difference in self.outputs if not difference.passed]


def _tolerance(value: float | None) -> float | None:
    """The value. Raises MisuseError for a tolerance that every output, or none, would pass."""
    if value is not None and not 0 <= value < math.inf:
        raise MisuseError(f"a tolerance of {value}: it is a number from 0 on")
    return value


@dataclass(frozen=True)
class Comparison:
    """Options of the command: how packages are compared with unsplit models."""

    inputs: Path | None = INPUTS
    reference: str | None = typer.Option(
        None,
        "--reference",
        help="Where the unsplit model runs: cpu0, cuda0. Default: the package's GPU if it fits there, else the CPU.",
        autocompletion=completion.devices,
    )
    settings: list[str] = typer.Option(
        [],
        "--set",
        metavar="NAME=VALUE",
        help="Another value for an input that was bound by 'splitc compile --set'.",
        autocompletion=completion.settings,
    )
    trusts_data: bool = TRUST_DATA
    rtol: float | None = typer.Option(
        None, "--rtol", help="Tolerance relative to each output's largest value.", callback=_tolerance
    )
    atol: float | None = typer.Option(
        None, "--atol", help="Absolute tolerance, added to the relative one.", callback=_tolerance
    )
    seed: int = SEED
    fill: list[str] = FILL
    shapes: list[str] = SHAPES
    memory: bool = MEASURE

    def check_fits_several(self) -> None:
        """Raise MisuseError if an option is given that is for one model only."""
        of_one = {"--inputs": self.inputs, "--set": self.settings, "--fill": self.fill, "--shapes": self.shapes}
        if given := [option for option, value in of_one.items() if value]:
            raise MisuseError(f"{given[0]} is for one model: name it, with --module")

    def make(self, load_session: Load, model: Path) -> Checked:
        """Run the package and the model on the same inputs."""
        made_up = (self.inputs, self.seed, self.fill, self.shapes)
        with shown_bars(), load_session() as session, open_feeds(session, *made_up) as feeds:
            actual = session.run(feeds)
            opened = open_reference(
                model,
                session.manifest,
                session.devices,
                session.threads * len(session.devices),
                asked=self.reference,
                settings=bound_inputs(session.manifest, parse_settings(self.settings)),
                trusts_data=self.trusts_data,
            )
            number_type = session.manifest.number_type
            compared = partial(compare, number_type=number_type, rtol=self.rtol, atol=self.atol)
            with opened as whole:
                # A tolerance that the user gave is not widened.
                excused = self.rtol is None and self.atol is None
                held = session.adapters.sum(None)
                # A model with slots of its own takes the adapters.
                given = feeds if held is None else {**feeds, **held.arrays}
                unset = session.manifest.unset
                judged = judge(compared, whole, given, whole.run(given), actual, excused=excused, unset=unset)
            measured = measure_ranks(load_session, session, feeds) if self.memory else []
            notes = [*judged.notes, *filter(None, [judged.unsteady])]
            if held is not None and not all(difference.passed for difference in judged.differences):
                notes.append(f"if {model.name} has no slots, it ran without the adapter: name one that has it merged")
            return Checked(judged.differences, str(whole.device), whole.why, measured, notes)


@with_options("load", loading)
@with_options("comparison", Comparison)
def check(
    load: Load,
    comparison: Comparison,
    package: Path = PACKAGE,
    unsplit: Path | None = typer.Argument(
        None,
        metavar="[MODEL]",
        help="The unsplit ONNX model; of a package of several, the models' folder.",
        autocompletion=completion.models,
        callback=model_there,
    ),
    option: Path | None = typer.Option(
        None, "--model", "-m", help="MODEL, as an option.", autocompletion=completion.models, callback=model_there
    ),
    report: Path | None = REPORT,
    as_json: bool = JSON,
) -> None:
    """Compare a package with the unsplit model on the same inputs.

    Exits with 4 if an output differs, or none can be compared.
    """
    model = _only_model(unsplit, option)
    check_outputs({"--report": report}, [package, model, comparison.inputs])
    check_report(report)
    module, pipeline = load.keywords["module"], read_pipeline(package)
    several = pipeline is not None and module is None and model.is_dir()
    names: Sequence[str | None] = [module]
    if pipeline is not None and several:
        names = [entry.name for entry in pipeline.modules]
    if len(names) > 1:
        comparison.check_fits_several()
    sources = {name: _find_model(package, pipeline, name, model) for name in names}
    checked, errors = _compare_all(load, package, sources, comparison, several)
    if not several:
        raise_all(errors)
    if report:
        _write_report(report, package, checked, load.keywords["devices"])
    if as_json:
        print_json({"modules": checked} if several else checked[module or ""])
    elif checked:
        print_checks(checked, several)
    differ: list[SplitcError] = []
    with collected(differ):
        where = f"in {plural(len(checked), 'module')}" if several else f"with {sources[module].name}"
        _conclude(checked, several, where, as_json)
    raise_all([*differ, *errors])


def _only_model(argument: Path | None, option: Path | None) -> Path:
    """The model that was given in one of two ways. Raises MisuseError unless there is one."""
    if argument is not None and option is not None:
        raise MisuseError(f"two models to compare with, {argument} and --model {option}: give one")
    model = argument or option
    if model is None:
        raise MisuseError("no model to compare with: give the unsplit one, as in splitc check PACKAGE MODEL")
    return model


def _compare_all(
    load: Load, package: Path, sources: Mapping[str | None, Path], comparison: Comparison, several: bool
) -> tuple[dict[str, Checked], list[SplitcError]]:
    """Compare each module with its model in `sources`. Errors name the module if there are several."""
    checked: dict[str, Checked] = {}
    errors: list[SplitcError] = []
    for name, source in sources.items():
        try:
            checked[name or ""] = comparison.make(partial(load, package, module=name), source)
        except SplitcError as error:
            errors.append(named(error, str(name)) if several else error)
    return checked, errors


def _find_model(package: Path, pipeline: PipelineFile | None, module: str | None, model: Path) -> Path:
    """The file of the unsplit model, which may be in a folder. Raises MisuseError if it does not exist."""
    if model.is_dir():
        known = None if pipeline is None else pipeline.find(find_module(package, module).name)
        if known is None:
            read_manifest(package)
            raise MisuseError(f"{model} is a folder, and {package} the package of one model: name the ONNX file")
        model = model / known.source
    if not model.is_file():
        raise MisuseError(f"no such model file: {model}")
    return model


def print_checks(checked: Mapping[str, Checked], several: bool) -> None:
    """Print what was compared, of each module if there are several."""
    if several:
        print_module_differences({name: result.outputs for name, result in checked.items()})
    for name, result in checked.items():
        out.print(f"{name}, reference: {result}" if several else f"reference: {result}")
        if not several:
            print_differences(result.outputs)
        for note in result.notes:
            out.print(f"{name}: {note}" if several else note, soft_wrap=True)
        if result.memory:
            print_memory(result.memory)
    if any(result.memory for result in checked.values()):
        print_memory_terms()


def _write_report(path: Path, package: Path, checks: Mapping[str, Checked], asked: Sequence[str]) -> None:
    from splitc.runtime.reports.package_pages import check_page

    checked = {
        name: (as_run(manifest, choose_devices(manifest, asked)), result.outputs, str(result), result.memory)
        for name, result in checks.items()
        for manifest in [read_manifest(find_module(package, name or None))]
    }
    write_page(path, check_page(package.name, checked))


def _conclude(checked: Mapping[str, Checked], several: bool, where: str, as_json: bool) -> None:
    """Say that all outputs agree. Raises OutputsDifferError if some do not, or if a model has none to compare."""
    count = sum(len(result.outputs) for result in checked.values())
    failed = [f"{name}.{output}" if several else output for name, result in checked.items() for output in result.failed]
    if failed:
        raise OutputsDifferError(f"{len(failed)} of {count} outputs differ beyond tolerance: {', '.join(failed)}")
    if silent := [name for name, result in checked.items() if not result.outputs]:
        raise OutputsDifferError(f"no output can be compared {f'of {first_few(silent)}' if several else where}")
    if not as_json and checked:
        out.print(Text.assemble((f"{count} of {count} outputs agree", "green"), f" {where}"))
