"""What was typed: an option that would have no effect is told of, never ignored."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from gpen_core.errors import UsageError, printable

IN_THE_FILE = "it is in the converted weights; gpen-core convert checks it"
# The options of the original's demo.py, and what serves here.
ORIGINAL = {
    "--task": "each task is a command: enhance, colorize, inpaint, seg2face",
    "--model": "use --weights with a converted file",
    "--indir": "name photos and folders without an option",
    "--outdir": "use --output",
    "--use_cuda": "leave it out, or use --device cuda",
    "--in_size": IN_THE_FILE,
    "--out_size": IN_THE_FILE,
    "--channel_multiplier": IN_THE_FILE,
    "--narrow": IN_THE_FILE,
    "--alpha": "use enhance --strength",
    "--use_sr": "use enhance --upscale, or --upscaler with a converted network",
    "--sr_scale": "use enhance --upscale",
    "--tile_size": "leave it out; tiles are as large as the up-scaler needs",
    "--save_face": "use enhance --save-faces with a folder",
}


class Verb(TyperCommand):
    """A command that refuses a second value where an option takes one, and knows the original's options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _advise(args, {name for parameter in self.params for name in parameter.opts})
        # The parser's third value names every option as often as it was typed.
        order = self.make_parser(ctx).parse_args(args=list(args))[2]
        for parameter, times in Counter(order).items():
            if times > 1 and _takes_one(parameter):
                raise UsageError(f"{as_typed(parameter)} is given {times} times; {self.name} takes one")
        return super().parse_args(ctx, args)


def _advise(arguments: Sequence[str], own: Collection[str]) -> None:
    """Raises UsageError for an option that is the original's alone."""
    for argument in arguments:
        if argument == "--":
            return
        option = argument.partition("=")[0]
        if option in ORIGINAL and option not in own:
            raise UsageError(f"{option} is an option of the original; here: {ORIGINAL[option]}")


def require_possible(arguments: Sequence[str]) -> None:
    """Raises UsageError for an argument that no file name or value can be: empty, or not writable as a path."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument == "" or re.fullmatch(r"--[\w-]+=", argument):
            option = printable(argument[:-1] or before)
            raise UsageError(
                f"{option}: an empty file name or value" if option.startswith("-") else "an empty file name"
            )
        try:
            possible = b"\0" not in os.fsencode(argument)
        except UnicodeEncodeError:
            possible = False
        if not possible:
            raise UsageError(f"{printable(argument)}: not a possible file name or value")


def typed_options(context: typer.Context) -> dict[str, str]:
    """Parameters that were given on the command line, each as it is typed."""
    return {p.name: as_typed(p) for p in context.command.params if p.name and _was_typed(context, p.name)}


def refuse(typed: Mapping[str, str], names: Collection[str], reason: str) -> None:
    """Raises UsageError if any of these parameters was given. reason: why it would have no effect."""
    idle = [typed[name] for name in names if name in typed]
    if idle:
        raise UsageError(f"{reason}, so {' and '.join(idle)} can't be used")


def as_typed(parameter: Any) -> str:
    """The long form of an option."""
    return str(next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0]))


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _takes_one(parameter: Any) -> bool:
    if parameter.param_type_name != "option" or parameter.multiple:
        return False
    # --compile and --no-compile are one option, and contradict each other.
    return not parameter.is_flag or bool(parameter.secondary_opts)
