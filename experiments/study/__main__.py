"""`python -m experiments.study FOLDER`: run what is left of the study in a folder."""

import argparse
from pathlib import Path

from experiments.study import Study


def main() -> None:
    """Run what is left of the study in a folder."""
    parser = argparse.ArgumentParser(prog="python -m experiments.study", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--executor", default="local", help="local or ray")
    parser.add_argument("--obey-stop", action="store_true", help="a stop flag that is there already counts")
    parser.add_argument("--workers", type=int, help="cells that run at the same time")
    options = parser.parse_args()
    study = Study.open(options.folder)
    if not options.obey_stop:
        study.store.clear_stop()
    study.run_left(options.executor, workers=options.workers)


if __name__ == "__main__":
    main()
