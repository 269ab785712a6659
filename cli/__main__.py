"""`python -m cli`."""

import sys

from .main import program

sys.exit(program())
