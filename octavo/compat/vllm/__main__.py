"""Run a script that was written for vLLM: `python -m octavo.compat.vllm script.py [arguments]`."""

import sys

from octavo.compat.vllm import main

sys.exit(main(sys.argv[1:]))
