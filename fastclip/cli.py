"""Argument parsing and exit statuses of `fastclip`; the work is in fastclip.commands.

Nothing here imports torch: `fastclip --help` answers at once, and each command imports what it
needs when it runs. Exit statuses: 0 fine, 1 the command found something wrong, 2 wrong input,
130 interrupted.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from fastclip import __version__
from fastclip.commands import InputError
from fastclip.commands.output import Output, OutputError

COMMANDS = {
    "demo": "one bad batch: a loss spike in half precision, and a real model, saved by clipping",
    "doctor": "what fastclip finds on this machine: versions, backends, and why each was chosen",
    "check": "every available backend against the float64 reference",
    "bench": "how fast fastclip clips on this machine, beside everybody else who is installed",
    "replay": "the log of a run through the default detectors: what happened, and when it began",
    "calibrate": "a clipping threshold from the log of a healthy run",
    "diagnose": "the log of a run: symptom, boundary, what to do, and how to see that it helped",
    "report": "the log of a run, or of two beside each other, as one page to look at",
}

LOG: tuple[str, dict[str, Any]] = ("log", {"metavar": "LOG", "help": "a log in JSONL"})
# Beside --json: the arguments of the command's run().
ARGUMENTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "bench": [
        ("--quick", {"action": "store_true", "help": "a few rows, in less than a minute"}),
        ("--all", {"dest": "every", "action": "store_true", "help": "also rows that take long"}),
        ("--list", {"dest": "listed", "action": "store_true", "help": "only name the rows"}),
        (
            "--filter",
            {
                "dest": "contains",
                "default": "",
                "metavar": "NAME",
                "help": "the rows whose name contains it: gpt2-xl, bfloat16-clipped, ...",
            },
        ),
        ("--threads", {"type": int, "metavar": "N", "help": "default: as many as torch takes"}),
        ("--backend", {"metavar": "NAME", "help": "instead of the automatic choice"}),
        (
            "--device",
            {"choices": ("cpu", "cuda"), "default": "cpu", "help": "default: %(default)s"},
        ),
        ("--csv", {"metavar": "PATH", "help": "also write every time, with the machine"}),
        ("--plot", {"metavar": "PATH", "help": "also draw it: png, svg or pdf"}),
    ],
    "check": [("--backend", {"metavar": "NAME", "help": "this one alone, which has to be usable"})],
    "replay": [LOG],
    "calibrate": [
        LOG,
        (
            "--clip-rate",
            {
                "type": float,
                "default": 0.01,
                "metavar": "R",
                "help": "the share of steps to clip (default: %(default)s)",
            },
        ),
        (
            "--from",
            {
                "type": int,
                "dest": "start",
                "metavar": "STEP",
                "help": "leave out the steps before it: the warm-up",
            },
        ),
    ],
    "diagnose": [
        LOG,
        ("--baseline", {"metavar": "GOOD", "help": "the log of a healthy run, to compare with"}),
    ],
    "report": [
        LOG,
        ("other", {"nargs": "?", "metavar": "LOG2", "help": "the log of a run to compare with"}),
        (
            "-o",
            {
                "dest": "output",
                "metavar": "FILE",
                "help": "the page (default: beside LOG, with the ending .html)",
            },
        ),
    ],
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line instead of the usage and a line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"fastclip: {message}; try `{self.prog} --help`\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fastclip", description="Fused gradient clipping and gradient statistics for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"fastclip {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."
        )
        command.add_argument(
            "--json", action="store_true", help="print one JSON document on stdout"
        )
        for flag, settings in ARGUMENTS.get(name, []):
            command.add_argument(flag, **settings)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options = vars(parser.parse_args(argv))
    name = options.pop("command")
    if name is None:
        parser.error(f"name a command ({', '.join(COMMANDS)})")
    command = importlib.import_module(f"fastclip.commands.{name}")
    status: int = command.run(**options)
    return status


def _told(argv: Sequence[str] | None) -> int:
    """The exit status; what went wrong is told in one line on stderr."""
    try:
        return _run(argv)
    except InputError as error:
        print(f"fastclip: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("fastclip: PyTorch is missing; install it with `pip install torch`", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fastclip: interrupted", file=sys.stderr)
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    errors = cast("TextIO | None", sys.stderr)
    if errors is not None and not errors.closed:
        return _answered(argv)
    # `2>&-`: nobody is to hear what goes there, and print would say it on stdout instead
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        return _answered(argv)


def _answered(argv: Sequence[str] | None) -> int:
    stream = cast("TextIO | None", sys.stdout)  # None where it was closed from the beginning
    if stream is None:
        print("fastclip: standard output is closed", file=sys.stderr)
        return 2
    output = Output(stream)
    try:
        with redirect_stdout(cast(TextIO, output)):
            try:
                return _told(argv)
            finally:
                output.flush()  # here, and not at exit, so that its error is met too
    except OutputError as error:
        output.discard()
        if isinstance(error.__cause__, BrokenPipeError):  # the reader (`| head`) has what it wanted
            return 141  # 128 + SIGPIPE, what a shell reports for any program in this place
        print(f"fastclip: cannot write to standard output: {error}", file=sys.stderr)
        return 2
