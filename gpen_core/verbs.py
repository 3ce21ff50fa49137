"""What the verbs share: their networks, the files they may touch, and one way through all photos."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from gpen_core.console import complain, say, say_json
from gpen_core.errors import GpenError, ImageError, UsageError
from gpen_core.progress import bar
from gpen_core.usage import refuse

if TYPE_CHECKING:
    from gpen_core.apart import Read
    from gpen_core.batch import Files, Outcome
    from gpen_core.plan import Job
    from gpen_core.presets import Preset
    from gpen_core.restorer import Options, Restorer
    from gpen_core.tasks import Task

DEFAULT_DETECTOR = "auto"
DETECT_SIZE = 1280


@dataclass(frozen=True)
class Networks:
    """Which networks to use, and how to run them. None leaves a choice to the preset, then to the default."""

    weights: str | tuple[str, ...]
    detector: str
    upscaler: str | None = None
    device: str = "auto"
    precision: str | None = None
    compile: bool | None = None
    batch: int | None = None
    preset: str | None = None
    parser: str | None = None
    template: str | None = None
    detect_size: int = DETECT_SIZE
    detector_device: str = "cpu"
    upscaler_tile: int | None = None
    backend: str = "auto"
    cache: Path | None = None
    memory: int | None = None

    def read(self) -> list[Read]:
        """The files of the networks that are on this machine, which nothing is to be written over."""
        from gpen_core.apart import Read
        from gpen_core.backend import PACKAGE
        from gpen_core.selection import find_all
        from gpen_weights import default_detector, resolve

        found = []
        with suppress(GpenError):
            found += [Read(path, "the weights") for path in find_all(self.weights, self.backend)]
        sidecars = [one.path.with_name(f"{one.path.name}.json") for one in found if one.path.suffix == PACKAGE]
        found += [Read(path, "what belongs to the weights") for path in sidecars]
        detector = default_detector() if self.detector == DEFAULT_DETECTOR else self.detector
        others = {"the detector": detector, "the up-scaler": self.upscaler, "the face parser": self.parser}
        for what, name in others.items():
            with suppress(GpenError):
                found += [] if name is None else [Read(resolve(name), what)]
        return found

    def chosen_preset(self, *, work: bool) -> Preset | None:
        """work: there is something to do, so that auto may ask the device."""
        from gpen_core.presets import find_preset

        if self.preset is None or (self.preset == "auto" and not work):
            return None
        return find_preset(_preset(self.preset, self.device))

    def filled_by(self, chosen: Preset | None) -> Networks:
        """With the preset's values where nothing else was said."""
        return replace(
            self,
            precision=self.precision or (chosen.precision if chosen else "auto"),
            compile=self.compile if self.compile is not None else bool(chosen and chosen.compile),
            batch=self.batch or (chosen.max_batch if chosen else None),
            upscaler_tile=chosen.tile if chosen else None,
            memory=chosen.networks if chosen else None,
        )


def process(
    inputs: list[str],
    output: str | None,
    recursive: bool,
    options: Options,
    files: Files,
    networks: Networks,
    save_faces: Path | None,
    compare: bool,
    report: Path | None,
    json_lines: bool,
    kind: str = "restoration",
    task: Task | None = None,
    mask_image: Path | None = None,
) -> NoReturn:
    """Do one task to every photo, tell of each, and leave with the exit code.

    kind: what the weights must be for. mask_image: what is read besides the photos.
    """
    from gpen_core.apart import Read, Written, require_apart
    from gpen_core.batch import run
    from gpen_core.files import exists, is_folder, require_writable
    from gpen_core.gallery import open_gallery
    from gpen_core.ledger import NAME
    from gpen_core.plan import files_of, listed, plan
    from gpen_core.report import report_to, require_report
    from gpen_core.restorer import Restorer
    from gpen_core.selection import beyond
    from gpen_core.tasks import restore

    if networks.weights == "auto" and kind != "restoration":
        raise UsageError(f"--weights auto takes weights for restoration: name those for {kind}")
    photos = [Path(text) for text in inputs]
    jobs = plan(
        photos,
        None if output is None else Path(output),
        recursive=recursive,
        # A path does not remember the slash that tells a folder.
        as_folder=output is not None and output.endswith(("/", os.sep)),
        beside=[] if save_faces is None else [save_faces],
        mask_image=mask_image,
        notice=complain,
    )
    # Of photos that are not there, this is to be said without waiting for PyTorch.
    work = any(exists(job.source) for job in jobs)
    chosen = networks.chosen_preset(work=work)
    use = networks.filled_by(chosen)
    if chosen is not None and options.long_side is None and options.tile is None:
        options = replace(options, long_side=chosen.long_side)
    if use.cache is not None:
        _require_cache(use.cache, bool(use.compile))
    gallery = open_gallery(jobs, save_faces, compare)
    recording = files.skip_existing or any(map(is_folder, photos))
    read, written = files_of(jobs)
    read += [*networks.read(), *([] if mask_image is None else [Read(mask_image, "the mask image")])]
    written += gallery.written(jobs)
    written += [Written(folder / NAME, "the record") for folder in {job.folder for job in jobs} if recording]
    written += [] if report is None else [Written(report, "the report (--report)")]
    written += [] if use.cache is None else [Written(use.cache / "inductor", "what is compiled (--cache)")]
    require_apart(read, written)
    if report is not None:
        require_report(report)
    for folder in {job.folder for job in jobs}:
        require_writable(folder)
    unknown = _unrecorded([job for job in jobs if not job.problem], output, compare, recording)
    if unknown:
        what = "a file is" if len(unknown) == 1 else f"{len(unknown)} files are"
        complain(f"gpen-core: {what} replaced that no record of an earlier run names: {listed(unknown)}")
    for warning in _warnings(photos, jobs, recursive, options, files):
        complain(f"gpen-core: {warning}")

    def load() -> Restorer:
        if use.compile and use.cache is None:
            _require_own_cache(use.device)
        found = None if options.whole else find_detector(use.detector)
        restorer = Restorer.load(
            use.weights,
            found,
            backend=use.backend,
            device=use.device,
            precision=use.precision or "auto",
            compile=bool(use.compile),
            cache=use.cache,
            max_batch=use.batch,
            upscaler=use.upscaler,
            parser=use.parser,
            template=use.template,
            detect_size=use.detect_size,
            detector_device=use.detector_device,
            upscaler_tile=use.upscaler_tile,
            memory=use.memory,
            task=kind,
        )
        # Of a preset's batch nobody expects that it fits.
        for line in beyond(restorer.runtime, networks.batch or 0):
            complain(f"gpen-core: {line}")
        return restorer

    def settings() -> str:
        found = None if options.whole else find_detector(use.detector)
        said = {"options": asdict(options), "precision": use.precision, "quality": files.quality, "compare": compare}
        said["faces"] = None if save_faces is None else str(save_faces.absolute())
        said |= {"template": use.template, "detect_size": use.detect_size}
        return fingerprint(use.weights, use.backend, found, use.upscaler, use.parser, **said)

    recorded = settings if recording else None
    with (
        cached_in_folder(use.cache if work else None, use.device),
        report_to(report) as write,
        bar(len(jobs)) as advance,
    ):

        def tell(outcome: Outcome) -> None:
            write(outcome.record())
            for line in (*outcome.notes, *(f"not written: {text}" for text in outcome.missing)):
                complain(f"{outcome.job.source}: {line}")
            if outcome.error:
                complain(f"gpen-core: {outcome.error}")
            if json_lines:
                say_json(outcome.record())
            elif not outcome.error:
                say(outcome.line())
            advance()

        summary = run(jobs, load, options, tell, files=files, settings=recorded, gallery=gallery, task=task or restore)
    if not jobs:
        complain(f"gpen-core: no photos found{'' if recursive else ' (--recursive looks into folders inside too)'}")
    if summary.stopped and summary.left:
        # The reason was told with the photo.
        complain("gpen-core: stopped: the photos that are left would meet the same")
    if len(jobs) > 1 or any(not job.named for job in jobs):
        complain(f"gpen-core: {summary.line()}")
    raise typer.Exit(summary.exit_code)


def _unrecorded(jobs: list[Job], output: str | None, compare: bool, recording: bool) -> list[Path]:
    """Files and links that are going to be replaced though the user did not name them and no record has them.

    recording: this run needs the records. Raises then what `Ledger` does.
    """
    from gpen_core.gallery import comparison_path
    from gpen_core.ledger import Ledger

    given = None if output is None else Path(output)
    recorded: set[Path] = set()
    for folder in {job.folder for job in jobs}:
        with nullcontext() if recording else suppress(GpenError, OSError), closing(Ledger(folder)) as ledger:
            recorded |= {job.target for job in jobs if job.folder == folder and ledger.names(job.target)}
    new = [job for job in jobs if job.target not in recorded]
    targets = [job.target for job in new if job.target != given]
    return [path for path in (*targets, *(comparison_path(job) for job in new if compare)) if os.path.lexists(path)]


def refuse_idle(typed: Mapping[str, str], options: Options, *, several: bool = False) -> None:
    """Raises UsageError for what has no effect on pictures that are taken as a whole.

    several: there are networks to choose from.
    """
    if not options.whole:
        return
    how = "--aligned" if options.aligned else "--tile"
    refuse(typed, ("detector", "detect_size", "detector_device"), f"nothing is detected with {how}")
    # Several networks have to agree on the crops that they were trained on.
    if not several:
        refuse(typed, ("template",), f"nothing is cropped with {how}")


def _warnings(photos: list[Path], jobs: list[Job], recursive: bool, options: Options, files: Files) -> Iterator[str]:
    """What was asked for and has no effect, but does no harm either."""
    from gpen_core.files import exists, is_folder
    from gpen_core.image_io import has_quality

    if recursive and all(exists(photo) and not is_folder(photo) for photo in photos):
        yield "--recursive has no effect: none of these is a folder"
    if files.quality is not None and jobs and not any(has_quality(job.target) for job in jobs):
        yield "--quality has no effect on PNG, TIFF and BMP"
    finish = {"--match-color": options.match_color, "--sharpen": options.sharpen, "--grain": options.grain}
    idle = [name for name, amount in finish.items() if amount]
    if options.strength == 0 and idle:
        yield f"{' and '.join(idle)}: no effect with --strength 0, which leaves the photo as it is"


def _require_cache(folder: Path, compile: bool) -> None:
    """Raises UsageError for a --cache that nothing can be kept in. One that is filled serves, as in an image."""
    from gpen_core.files import is_folder, require_writable

    if not compile:
        raise UsageError("--cache is for --compile")
    try:
        if not (is_folder(folder) and any(folder.iterdir())):
            require_writable(folder)
    except GpenError as error:
        raise UsageError(f"--cache {error}") from None
    except OSError as error:
        raise UsageError(f"--cache {folder}: {(error.strerror or str(error)).lower()}") from None


def _require_own_cache(device: str) -> None:
    """Raises UsageError if the user's own folder for compiled networks can't be one, before anything is compiled."""
    from gpen_core.backend import has_torch
    from gpen_core.files import require_possible_folder

    if not has_torch():
        return
    from gpen_core.package_cache import default_folder
    from gpen_core.runtime import choose_device, compiles_ahead

    folder = default_folder()
    try:
        if folder is not None:
            require_possible_folder(folder)
    except ImageError as error:
        if device not in ("auto", "cpu") or not compiles_ahead(choose_device(device)):
            return
        raise UsageError(f"{error}: set GPEN_CORE_HOME to a folder, or use --cache") from None


def _preset(name: str, device: str) -> str:
    """The preset's name; auto asks the device for its memory."""
    if name != "auto":
        return name
    from gpen_core.backend import has_torch
    from gpen_core.presets import choose_preset

    if not has_torch():
        return choose_preset(None)
    import torch

    from gpen_core.runtime import choose_device

    found = choose_device(device)
    memory = torch.cuda.get_device_properties(found).total_memory if found.type == "cuda" else None
    return choose_preset(memory)


def cached_in_folder(folder: Path | None, device: str) -> AbstractContextManager[None]:
    """Compilations kept in a folder, if one is given and the runtime doesn't do that by itself."""
    if folder is None:
        return nullcontext()
    from gpen_core.backend import require_torch

    require_torch()
    from gpen_core.compile_cache import cached_in
    from gpen_core.runtime import choose_device, compiles_ahead

    return nullcontext() if compiles_ahead(choose_device(device)) else cached_in(folder)


def fingerprint(
    weights: str | tuple[str, ...],
    backend: str,
    detector: str | Path | None,
    upscaler: str | None,
    parser: str | None,
    **others: Any,
) -> str:
    """The fingerprint of all that decides what becomes of a photo."""
    from gpen_core.files import sha256
    from gpen_core.ledger import settings_fingerprint
    from gpen_core.selection import find_all
    from gpen_weights import resolve

    names = {"detector": detector, "upscaler": upscaler, "parser": parser}
    files = {key: None if name is None else sha256(resolve(name)) for key, name in names.items()}
    # In whichever order they were named.
    hashes = sorted(map(sha256, find_all(weights, backend)))
    said = hashes[0] if len(hashes) == 1 else hashes
    return settings_fingerprint({**files, "weights": said, **others})


def find_detector(name: str) -> str | Path:
    """The detector's path; centerface is fetched when it is not here."""
    from gpen_core.errors import MissingWeightsError
    from gpen_weights import default_detector, pull, resolve

    meant = default_detector() if name == "auto" else name
    try:
        return resolve(meant)
    except MissingWeightsError:
        if meant != "centerface":
            raise
    # One line in the end, whichever way it goes.
    told: list[str] = []
    path = pull(meant, notify=told.append)
    complain(f"gpen-core: no detector was here; {'; '.join(told)}")
    return path
