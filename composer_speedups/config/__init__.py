"""The typed config: schema, loading and overrides, and the help text made from both."""

from composer_speedups.config.checks import Origins
from composer_speedups.config.help import help_text
from composer_speedups.config.load import load_config, load_with_origins, parse_command_line, save_config
from composer_speedups.config.schema import Config
from composer_speedups.config.written import written

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
