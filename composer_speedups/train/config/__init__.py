"""The typed config: schema, loading and overrides, and the help text made from both."""

from composer_speedups.core.settings import Origins
from composer_speedups.train.config.help import help_text
from composer_speedups.train.config.load import load_config, load_with_origins, parse_command_line, save_config
from composer_speedups.train.config.schema import Config
from composer_speedups.train.config.written import written

__all__ = [
    "Config",
    "Origins",
    "help_text",
    "load_config",
    "load_with_origins",
    "parse_command_line",
    "save_config",
    "written",
]
