"""train.py with a rank that dies in its third batch: ``python -m composer.cli.launcher -n 2 -m tests.reference.dying``.

Environment variables: ``DYING_RANK``, the rank that dies, and ``DYING_HOW``, one of ``raise``, ``refuse`` (raise a
``DataError``, a user's mistake) and ``kill``.
"""

from __future__ import annotations

import os
import signal
import sys

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from composer_speedups.core.errors import DataError
from composer_speedups.train import application
from composer_speedups.train.cli import exit_codes, read_command_line
from composer_speedups.train.startup import StartupClock


class Dying(Callback):
    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value != 2 or str(dist.get_global_rank()) != os.environ["DYING_RANK"]:
            return
        if os.environ["DYING_HOW"] == "raise":
            raise ArithmeticError("the rank's own words")
        if os.environ["DYING_HOW"] == "refuse":
            raise DataError("the rank's own words; and the fix")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    with exit_codes():
        config = read_command_line(sys.argv[1:])
        application.train(config, StartupClock(), callbacks=[Dying()])
