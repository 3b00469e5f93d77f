"""longdraft dashboard: panels of a training and of its draft in serving, as a saved W&B view or from logs as an HTML report and a picture."""

import argparse
import sys
from pathlib import Path

from longdraft.bench.dashboard import workspace
from longdraft.bench.dashboard.logs import find_runs, read_run, read_runs
from longdraft.bench.dashboard.page import page
from longdraft.bench.dashboard.picture import png
from longdraft.bench.dashboard.serving import add
from longdraft.errors import UserError


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="longdraft dashboard",
        description="Panels of trainings: loss, accuracy by depth, accept length by context, speed, memory; and of their drafts in "
        "serving: accept length, speed, quality. With --entity "
        "and --project as a saved view of a W&B project; without, or without a key, from the runs' logs as an HTML report.",
    )
    parser.add_argument("--entity", help="W&B user or team")
    parser.add_argument("--project", default="longdraft", help="W&B project (default: longdraft, as tracking.project)")
    parser.add_argument(
        "--run", nargs="+", type=Path, metavar="FOLDER", help="runs' folders (default: all that lie in runs/)"
    )
    parser.add_argument(
        "--record",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="records of longdraft bench acceptance, quality or speed of the one run's draft: kept in its folder, sent to its W&B "
        "run if it has one, and shown from then on",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="report to write (default: dashboard.html)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write all panels as one picture too")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the command line.

    Raises:
        UserError: no logs where they should be, an output that cannot be written, a record without figures, or W&B refused the view.
    """
    args = parse(argv)
    if args.record:
        keep(args.run or [], args.record)
    if args.entity and workspace.has_key():
        print(f"dashboard at {workspace.save(workspace.build(args.entity, args.project))}")
        if not (args.run or args.html or args.png):
            return 0
    write_report(args.run, args.html or Path("dashboard.html"), args.png)
    if args.entity and not workspace.has_key():
        print(
            f"no W&B key, so {args.entity}/{args.project} has no dashboard yet: run wandb login or set WANDB_API_KEY, then "
            "the same command again; the report above has the same panels",
            file=sys.stderr,
        )
    return 0


def keep(runs: list[Path], records: list[Path]) -> None:
    """Put records into the folder of the run whose draft they are of.

    Raises:
        UserError: several runs or none, no logs in it, or a record that holds no such figures.
    """
    if len(runs) != 1:
        raise UserError(
            f"--record belongs to one run and --run names {len(runs)}: give the run whose draft was measured"
        )
    run = read_run(runs[0], runs[0].name)
    add(runs[0], records, run.starts[-1] if run.starts else {}, print)


def write_report(folders: list[Path] | None, html: Path, picture: Path | None) -> None:
    """Read the logs and write the files, each whole or not at all."""
    chosen = folders or find_runs(Path("runs"))
    if not chosen:
        raise UserError("runs/ holds no run with logs: give --run FOLDER, a run's own folder")
    runs = read_runs(chosen)
    try:
        if picture is not None:
            png(runs, picture)
            print(f"wrote {picture}")
        part = html.with_name(html.name + ".part")
        part.write_text(page(runs))
        part.replace(html)
    except OSError as error:
        raise UserError(f"{error.filename or html} cannot be written ({error.strerror}): give another place") from None
    print(f"wrote {html}")
