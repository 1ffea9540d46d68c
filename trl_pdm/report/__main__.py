"""Write the report of a run: one HTML page with its curves, and with the tokens that its mask held back."""

import argparse
from collections.abc import Sequence

from . import ReportError, write_report


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m trl_pdm.report", description=__doc__)
    parser.add_argument("run_dir", help="output_dir of the run")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="RUN", help="output_dirs of runs to draw beside it"
    )
    parser.add_argument("--step", type=int, help="step whose tokens to show (default: the last one recorded)")
    args = parser.parse_args(argv)
    try:
        print(write_report(args.run_dir, args.compare, args.step))
    except ReportError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
