"""`python -m accumulus` is the command `accumulus`."""

import sys

from accumulus.cli.main import main

if __name__ == "__main__":  # a spawned worker imports this file again, and must not start the command
    sys.exit(main())
