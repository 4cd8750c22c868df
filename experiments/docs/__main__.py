"""`python -m experiments.docs [FOLDER]`: build the documentation."""

import sys

from experiments.docs import build_docs
from workbench.errors import CacheError

try:
    print(build_docs(*sys.argv[1:2]))
except CacheError as error:
    sys.exit(str(error))
