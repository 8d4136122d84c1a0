"""``python -m composer_speedups.train -f FILE [key=value ...]``; see ``--help``."""

from composer_speedups.train.application import command

if __name__ == "__main__":
    command()
