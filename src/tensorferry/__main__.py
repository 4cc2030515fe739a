"""``python -m tensorferry``: the command line."""

from tensorferry.cli import main

main()
